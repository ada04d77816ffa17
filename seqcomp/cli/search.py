"""``seqcomp search --model M --cluster C --seq-len S``: which plan is the fastest?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seqcomp.cli.dtypes import dtype_on
from seqcomp.cli.estimate import Mode
from seqcomp.cli.options import (
    DebugOption,
    DocumentsOption,
    JsonOption,
    LengthOption,
    SpeedOption,
    documents_in,
    whole,
)
from seqcomp.cli.reading import reading
from seqcomp.cli.refusal import refusal, writable, write
from seqcomp.cost.run import Run
from seqcomp.diagnostics import PlanError
from seqcomp.plan.load import dump_plan

if TYPE_CHECKING:
    from seqcomp.hardware.cluster import Cluster
    from seqcomp.search.search import Found

FOUND = 0
USAGE_CODES = ("SC010", "SC020", "SC027", "SC028")


def search(
    *,
    model: Annotated[
        str,
        typer.Option(help="A known model such as llama3-8b, or a spec as of validate; no weights."),
    ],
    cluster: Annotated[str, typer.Option(help="A known cluster such as h100, or a YAML file.")],
    seq_len: LengthOption,
    gpus: Annotated[
        int | None,
        typer.Option(
            parser=whole, metavar="N", help="How many GPUs; all of the cluster otherwise."
        ),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(parser=whole, metavar="N", help="Sequences of a step, of all GPUs together."),
    ] = 1,
    mode: Annotated[Mode, typer.Option(help="A training step, or a prefill.")] = Mode.train,
    documents: DocumentsOption = None,
    dtype: SpeedOption = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the best plan.")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """The fastest of all plans that are legal and fit, why, and what the next would change.

    Exit 0 found, 1 nothing fits or refused, 2 wrong usage. Needs no GPU, and for known models no
    torch. The plan is for exactly as many GPUs as asked for.
    """
    from seqcomp.hardware.load import load_cluster

    writable(out)
    packed = documents_in(documents)
    try:
        machine = load_cluster(cluster)
        computes, notes = dtype_on(machine, dtype)
        run = Run(seq_len, batch, computes, "train" if mode is Mode.train else "prefill", packed)
        with reading(model):
            found = _found(model, machine, gpus, run)
        found = replace(found, notes=(*found.notes, *notes))
    except PlanError as error:
        raise refusal(error, {}, as_json=as_json, debug=debug, usage=USAGE_CODES) from None
    if out is not None:
        write(out, _file(found))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        from seqcomp.report.search import search_text

        typer.echo(search_text(found))
        typer.echo()
        typer.echo(dump_plan(found.plan), nl=False)
    raise typer.Exit(FOUND)


def _found(model: str, machine: Cluster, gpus: int | None, run: Run) -> Found:
    from seqcomp.integrations.shapes import read_shape
    from seqcomp.search.search import search as run_search
    from seqcomp.search.space import Space

    loss_inside = computes_loss(model)
    return run_search(
        read_shape(model),
        machine,
        run,
        gpus=gpus,
        outputs={"logits": "drop"} if run.trains and loss_inside else {},
        space=Space() if loss_inside else Space(loss_chunks=(1,)),
    )


def computes_loss(model: str) -> bool:
    """Whether a model is known to take labels and to give logits beside its loss.

    Its logits are then dropped in training, and may be made in chunks.
    """
    kind, _, name = model.partition(":")
    causal_lm = name.partition("?")[0].endswith(("ForCausalLM", "LMHeadModel"))
    return not name or (kind == "hf" and causal_lm)


def _file(found: Found) -> str:
    """The plan, with what it was found for as comments."""
    run, best = found.pricer.run, found.best.price
    found_for = f"{found.pricer.model.name} on {found.gpus} GPUs of {found.pricer.cluster.name}"
    drops = "drop" in found.plan.outputs.values()
    lines = (
        f"# Found by seqcomp search for {found_for},",
        f"# {run.mode}, length {run.seq_len}, batch {run.batch} in all, {run.dtype}.",
        f"# Estimated: {best.step_seconds:.3g} s a step, {best.peak_bytes / 2**30:.1f} GiB a GPU.",
        *(("# Logits are dropped: train on the loss that the model gives.",) if drops else ()),
    )
    return "\n".join((*lines, dump_plan(found.plan)))
