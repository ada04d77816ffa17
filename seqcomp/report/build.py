"""A report of one lowered program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from seqcomp.diagnostics import Diagnostic


@dataclass(frozen=True)
class Report:
    """Rows of communication and findings of one program."""

    findings: tuple[Diagnostic, ...]


def build_report(program: Any, batch: Any, length: Any, resolved: Any, context: Any) -> Report:
    """Placeholder of the interface while the rows are being built."""
    return Report(program.findings)
