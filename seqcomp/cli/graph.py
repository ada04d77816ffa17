"""``seqcomp graph PLAN --model M --seq-len S``: what is computed between which redistributions?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from seqcomp.cli.dtypes import Dtype
from seqcomp.cli.reading import reading
from seqcomp.cli.refusal import refusal, write
from seqcomp.diagnostics import PlanError

DRAWN = 0


def graph(
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
    module: Annotated[
        str, typer.Option(metavar="PATH", help="Of this module only, such as model.layers.0.")
    ] = "",
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write it: .svg, .json, else as text.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object to standard output.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of what failed.")
    ] = False,
) -> None:
    """Regions of local work, the redistributions between them, and where values live.

    Of equal blocks one is drawn. Exit 0 drawn, 1 refused, 2 wrong usage. Needs no processes, no
    GPU and no weights.
    """
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
    if out is not None:
        title = ", ".join(filter(None, (plan, model, module)))
        drawn = standalone(found, title) if kind == ".svg" else None
        write(out, drawn or (data if kind == ".json" else graph_text(found)))
    if as_json or out is None:
        typer.echo(data if as_json else graph_text(found))
    raise typer.Exit(DRAWN)
