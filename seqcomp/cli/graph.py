"""``seqcomp graph PLAN --model M --seq-len S``: what is computed between which redistributions?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from seqcomp.cli.options import (
    BatchOption,
    DebugOption,
    DtypeOption,
    JsonOption,
    LengthOption,
    ModelOption,
    PlanArgument,
)
from seqcomp.cli.reading import reading
from seqcomp.cli.refusal import refusal, writable, write
from seqcomp.diagnostics import PlanError

DRAWN = 0


def graph(
    plan: PlanArgument,
    *,
    model: ModelOption,
    seq_len: LengthOption,
    batch: BatchOption = 1,
    dtype: DtypeOption = None,
    module: Annotated[
        str, typer.Option(metavar="PATH", help="Of this module only, such as model.layers.0.")
    ] = "",
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write it: .svg, .json, else as text.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Regions of local work, the redistributions between them, and where values live.

    Of equal blocks one is drawn. Exit 0 drawn, 1 refused, 2 wrong usage. Needs no processes, no
    GPU and no weights.
    """
    writable(out)
    try:
        with reading(model):
            from seqcomp.integrations.explain import graph as run
            from seqcomp.report.html.graph import graph_text, standalone

            found = run(model, plan, seq_len=seq_len, batch=batch, dtype=dtype, module=module)
    except PlanError as error:
        usage = ("SC020", "SC032")
        head = {"source": plan}
        raise refusal(error, head, as_json=as_json, debug=debug, usage=usage) from None
    data = json.dumps(found.to_json(), indent=2)
    kind = Path(out).suffix if out is not None else ""
    if as_json or out is None:
        typer.echo(data if as_json else graph_text(found))
    if out is not None:
        title = ", ".join(filter(None, (plan, model, module)))
        drawn = standalone(found, title) if kind == ".svg" else None
        write(out, drawn or (data if kind == ".json" else graph_text(found)))
    raise typer.Exit(DRAWN)
