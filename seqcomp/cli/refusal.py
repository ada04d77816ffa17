"""How a command ends that was refused."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import typer

from seqcomp.diagnostics import PlanError, diagnostic

REFUSED, WRONG_USAGE = 1, 2

_OPTIONS = ("documents",)
"""Places that only an option of a command fills, never a plan."""


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
        usage: codes that mean that the command was called in a wrong way, as the places of options
            do.
    """
    if debug:
        traceback.print_exception(error)
    for item in error.diagnostics:
        typer.echo(str(item), err=True)
    if as_json:
        found = [item.to_json() for item in error.diagnostics]
        typer.echo(json.dumps({**head, "diagnostics": found}, indent=2))
    wrong = any(item.code in usage or item.where in _OPTIONS for item in error.diagnostics)
    return typer.Exit(WRONG_USAGE if wrong else REFUSED)


def writable(path: Path | str | None) -> None:
    """Ends the command, before its work, where the file that it is to write cannot be."""
    if path is None:
        return
    folder = Path(path).parent
    found = "a folder" if Path(path).is_dir() else "" if folder.is_dir() else f"no folder {folder}"
    if found or not os.access(folder, os.W_OK):
        _unwritable(path, found or f"{folder} is not yours to write to")


def write(path: Path | str, text: str) -> None:
    """Writes a file that the user named and says so; ends the command where it cannot."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        _unwritable(path, error.strerror or str(error))
    typer.echo(f"written to {path}", err=True)


def _unwritable(path: Path | str, found: str) -> NoReturn:
    legal, fix = "a file in a folder that is there", f"for example {Path(path).name or 'out'}"
    item = diagnostic("SC031", where=str(path), found=found, legal=legal, help=fix)
    typer.echo(str(item), err=True)
    raise typer.Exit(WRONG_USAGE) from None
