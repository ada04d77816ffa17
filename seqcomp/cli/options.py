"""Arguments and options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

from seqcomp.cli.dtypes import Dtype
from seqcomp.cost.run import MOST

PlanArgument = Annotated[
    str, typer.Argument(metavar="PLAN", help="A file, or a preset such as usp_4x8.")
]
ModelOption = Annotated[
    str,
    typer.Option(
        help="A known model (llama3-8b, llama3-70b, llama3-405b), or "
        "hf:<Architecture>[?key=value&...], hf:path/config.json, titan:<model>/<flavor> or "
        "python:<module>:<factory>. No weights are made."
    ),
]


def whole(given: str | int) -> int:
    """A whole number of 1 or more, as commands take it; defaults come as numbers."""
    plain = str(given).replace("_", "").strip()
    if plain.isdecimal() and 1 <= int(plain) <= MOST:
        return int(plain)
    legal = f"allowed: whole numbers from 1 to {MOST}, such as 131072"
    raise typer.BadParameter(f"found: {str(given)[:100]!r}; {legal}")


LengthOption = Annotated[
    int, typer.Option(parser=whole, metavar="TOKENS", help="Full sequence length in tokens.")
]
BatchOption = Annotated[
    int, typer.Option(parser=whole, metavar="N", help="Sequences on each data rank.")
]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Of weights and buffers; the model's own otherwise.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to standard output.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of what failed.")]
