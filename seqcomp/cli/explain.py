"""``seqcomp explain PLAN --model M --seq-len S``: what would a rank send, compute and hold?"""

from __future__ import annotations

import json
import traceback
from enum import StrEnum
from typing import Annotated

import typer

from seqcomp.cli.reading import reading
from seqcomp.diagnostics import PlanError

EXPLAINED, REFUSED, WRONG_USAGE = 0, 1, 2


class Dtype(StrEnum):
    """Of weights and buffers."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    fp64 = "fp64"


def explain(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A file, or a preset such as usp_4x8.")
    ],
    *,
    model: Annotated[
        str,
        typer.Option(
            help="hf:<Architecture>[?key=value&...], hf:path/config.json, titan:<model>/<flavor> "
            "or python:<module>:<factory>. No weights are made."
        ),
    ],
    seq_len: Annotated[int, typer.Option(min=1, help="Full sequence length in tokens.")],
    batch: Annotated[int, typer.Option(min=1, help="Sequences on each data rank.")] = 1,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of weights and buffers; the model's own otherwise.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object to standard output.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of what failed.")
    ] = False,
) -> None:
    """What one training step does on a rank: collectives, attention work, memory, findings.

    Exit 0 explained, 1 refused, 2 wrong usage. Needs no processes, no GPU and no weights, and
    takes any number of ranks.
    """
    try:
        with reading(model):
            from seqcomp.integrations.explain import explain as run

            report = run(
                model, plan, seq_len=seq_len, batch=batch, dtype=dtype.value if dtype else None
            )
    except PlanError as error:
        if debug:
            traceback.print_exc()
        for item in error.diagnostics:
            typer.echo(str(item), err=True)
        if as_json:
            found = [item.to_json() for item in error.diagnostics]
            typer.echo(json.dumps({"source": plan, "diagnostics": found}, indent=2))
        usage = any(item.code == "SC020" for item in error.diagnostics)
        raise typer.Exit(WRONG_USAGE if usage else REFUSED) from None
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else f"{plan}: {report}")
    raise typer.Exit(EXPLAINED)
