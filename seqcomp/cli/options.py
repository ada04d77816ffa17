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
LengthOption = Annotated[int, typer.Option(min=1, max=MOST, help="Full sequence length in tokens.")]
BatchOption = Annotated[int, typer.Option(min=1, max=MOST, help="Sequences on each data rank.")]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Of weights and buffers; the model's own otherwise.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to standard output.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of what failed.")]
