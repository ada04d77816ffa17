"""Numbers and tables as plain text; imports no torch."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def as_text(parts: Sequence[Table | str], width: int = 160) -> str:
    """Plain text without colours or trailing blanks."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def pattern(module: str) -> str:
    """'layers.3.attn' -> 'layers.*.attn'."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def count_of(number: float) -> str:
    """A number with a decimal prefix, three digits."""
    value, prefix = float(number), ""
    for prefix in ("", " k", " M", " G", " T", " P", " E"):
        if value < 999.5 or prefix == " E":
            break
        value /= 1000
    return f"{value:.3g}{prefix}"


def readable(size: int) -> str:
    """Bytes with a binary unit, three digits."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.3g} {unit}"
