"""``seqcomp explain PLAN --model M --seq-len S``: what would a rank send, compute and hold?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from seqcomp.cli.options import (
    BatchOption,
    DebugOption,
    DocumentsOption,
    DtypeOption,
    JsonOption,
    LengthOption,
    ModelOption,
    PlanArgument,
    documents_in,
)
from seqcomp.cli.reading import reading
from seqcomp.cli.refusal import refusal, writable, write
from seqcomp.diagnostics import PlanError

EXPLAINED = 0


def explain(
    plan: PlanArgument,
    *,
    model: ModelOption,
    seq_len: LengthOption,
    batch: BatchOption = 1,
    documents: DocumentsOption = None,
    dtype: DtypeOption = None,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a page of it, which needs no other file."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0.001, max=1e9, help="Memory of one rank in GiB, drawn on the page."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """What one training step does on a rank: collectives, attention work, memory, findings.

    Exit 0 explained, 1 refused, 2 wrong usage. Needs no processes, no GPU and no weights, and
    takes any number of ranks.
    """
    writable(html)
    packed = documents_in(documents)
    try:
        with reading(model):
            from seqcomp.integrations.explain import explain as run

            report = run(model, plan, seq_len=seq_len, batch=batch, dtype=dtype, documents=packed)
    except PlanError as error:
        raise refusal(error, {"source": plan}, as_json=as_json, debug=debug) from None
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else f"{plan}: {report}")
    if html is not None:
        size = None if budget is None else round(budget * 2**30)
        write(html, report.to_html(title=f"{plan}, {model}", budget=size))
    raise typer.Exit(EXPLAINED)
