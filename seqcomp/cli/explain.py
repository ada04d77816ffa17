"""``seqcomp explain PLAN --model M --seq-len S``: what would a rank send, compute and hold?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from seqcomp.cli.dtypes import Dtype
from seqcomp.cli.reading import reading
from seqcomp.cli.refusal import refusal, write
from seqcomp.diagnostics import PlanError

EXPLAINED = 0


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
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a page of it, which needs no other file."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0, help="Memory of one rank in GiB, drawn on the page."),
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

            report = run(model, plan, seq_len=seq_len, batch=batch, dtype=dtype)
    except PlanError as error:
        raise refusal(error, {"source": plan}, as_json=as_json, debug=debug) from None
    if html is not None:
        size = None if budget is None else round(budget * 2**30)
        write(html, report.to_html(title=f"{plan}, {model}", budget=size))
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else f"{plan}: {report}")
    raise typer.Exit(EXPLAINED)
