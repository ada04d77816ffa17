"""The command ``seqcomp``; one file per subcommand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; ends with ``SystemExit`` (0 fine, 1 refused, 2 wrong usage)."""
    from seqcomp.cli.app import build_app

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may be any bytes
    build_app()(args=None if argv is None else list(argv), prog_name="seqcomp")
