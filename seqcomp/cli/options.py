"""Arguments and options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

from seqcomp.cli.dtypes import Dtype, Speed
from seqcomp.cost.run import MOST
from seqcomp.layout.documents import lengths_of

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
DocumentsOption = Annotated[
    str | None,
    typer.Option(
        metavar="LENGTHS",
        help="Documents that every sequence packs, such as 4096,8192 or 4096x32; they add up to "
        "the length.",
    ),
]
BatchOption = Annotated[
    int, typer.Option(parser=whole, metavar="N", help="Sequences on each data rank.")
]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Of weights and buffers; the model's own otherwise.")
]
SpeedOption = Annotated[
    Speed | None,
    typer.Option(
        help="Of weights and activations; by default that in which the cluster was measured: "
        "bf16, of CPUs fp32."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to standard output.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of what failed.")]


def documents_in(text: str | None) -> tuple[int, ...] | None:
    """The lengths that `DocumentsOption` names; usage error for what is none."""
    if text is None:
        return None
    try:
        return lengths_of(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text[:100]!r} is no list of lengths: 4096,8192 or 4096x32", param_hint="--documents"
        ) from None
