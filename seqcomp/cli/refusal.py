"""How a command ends that was refused."""

from __future__ import annotations

import json
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import typer

from seqcomp.diagnostics import PlanError

REFUSED, WRONG_USAGE = 1, 2


def refusal(
    error: PlanError,
    head: Mapping[str, Any],
    *,
    as_json: bool,
    debug: bool,
    usage: Collection[str] = ("SC020",),
) -> typer.Exit:
    """Prints the diagnostics to standard error, to raise what comes back.

    Args:
        head: what stands before the diagnostics in JSON, which goes to standard output.
        usage: codes that mean that the command was called in a wrong way.
    """
    if debug:
        traceback.print_exception(error)
    for item in error.diagnostics:
        typer.echo(str(item), err=True)
    if as_json:
        found = [item.to_json() for item in error.diagnostics]
        typer.echo(json.dumps({**head, "diagnostics": found}, indent=2))
    wrong = any(item.code in usage for item in error.diagnostics)
    return typer.Exit(WRONG_USAGE if wrong else REFUSED)


def write(path: str, text: str) -> None:
    """Writes a file that the user named; ends the command where that is not possible."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        typer.echo(f"{path} cannot be written: {error.strerror or error}", err=True)
        raise typer.Exit(WRONG_USAGE) from None
