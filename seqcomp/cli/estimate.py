"""``seqcomp estimate PLAN --model M --cluster C --seq-len S``: what would a step cost?"""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import typer

from seqcomp.cli.dtypes import dtype_on
from seqcomp.cli.options import (
    BatchOption,
    DebugOption,
    DocumentsOption,
    JsonOption,
    LengthOption,
    PlanArgument,
    SpeedOption,
    documents_in,
)
from seqcomp.cli.reading import reading
from seqcomp.cli.refusal import REFUSED, refusal
from seqcomp.diagnostics import PlanError, errors_in

FITS = 0
_USAGE = {"SC020", "SC027", "SC028"}


class Mode(StrEnum):
    """What a step is."""

    train = "train"
    prefill = "prefill"


def estimate(
    plan: PlanArgument,
    *,
    model: Annotated[
        str,
        typer.Option(
            help="A known shape (llama3-8b, gpt-175b, ...), or hf:<Architecture>[?key=value&...], "
            "hf:path/config.json, titan:<model>/<flavor>, python:<module>:<factory>."
        ),
    ],
    cluster: Annotated[
        str, typer.Option(help="A known cluster (h100, a100, ...), or a YAML file of that format.")
    ],
    seq_len: LengthOption,
    batch: BatchOption = 1,
    documents: DocumentsOption = None,
    dtype: SpeedOption = None,
    mode: Annotated[
        Mode, typer.Option(help="A training step, or a forward that keeps keys and values.")
    ] = Mode.train,
    gpu_hour_price: Annotated[
        float | None, typer.Option(min=0, max=1e12, help="Of one GPU for one hour, in any unit.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Step time, memory, FLOPs and price of a plan on a cluster, from shapes and measured rates.

    Exit 0 it fits, 1 it does not or is refused, 2 wrong usage. Needs no processes and no GPU, and
    for known shapes no torch.
    """
    from seqcomp.cost.estimate import estimate as run_estimate
    from seqcomp.cost.run import Mode as RunMode
    from seqcomp.cost.run import Run
    from seqcomp.hardware.load import load_cluster
    from seqcomp.integrations.shapes import read_shape
    from seqcomp.plan.load import load_plan
    from seqcomp.plan.resolve import resolve
    from seqcomp.report.estimate import estimate_text

    packed = documents_in(documents)
    try:
        machine = load_cluster(cluster)
        computes, notes = dtype_on(machine, dtype)
        loaded = load_plan(plan)
        with reading(model):
            shape = read_shape(model)
        resolved = resolve(loaded, shape.facts, seq_len=seq_len)
        kind: RunMode = "train" if mode is Mode.train else "prefill"
        run = Run(seq_len, batch, computes, kind, packed)
        found = run_estimate(resolved, shape, machine, run, gpu_hour_price=gpu_hour_price)
        found = replace(found, findings=(*found.findings, *notes))
    except PlanError as error:
        head = {"source": plan}
        raise refusal(error, head, as_json=as_json, debug=debug, usage=_USAGE) from None
    if as_json:
        typer.echo(json.dumps({"source": plan, **found.to_json()}, indent=2))
    else:
        typer.echo(f"{plan}: {estimate_text(found)}")
    raise typer.Exit(REFUSED if errors_in(found.findings) else FITS)
