"""Diagnostics: what is wrong (or worth knowing), where, and what would be legal.

``PlanError`` is the one exception for users' mistakes; it carries every diagnostic
found, not only the first. The texts and severities live in the table of ``codes.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from seqcomp.diagnostics.codes import CODES, CodeInfo, Severity

__all__ = [
    "CODES",
    "CodeInfo",
    "Diagnostic",
    "PlanError",
    "Severity",
    "diagnostic",
    "errors_in",
    "raise_for_errors",
]

Value = str | int | float | bool | tuple[Any, ...] | None
"""What ``found`` and ``legal`` may hold: JSON scalars and (nested) tuples of them."""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding.

    ``where`` is ``file:line:column path.in.plan``, a plan path or a module path; ``found``
    and ``legal`` are the offending value and what is allowed in its place; ``help`` says
    what to change.
    """

    code: str
    severity: Severity
    message: str
    where: str = ""
    found: Value = None
    legal: Value = None
    help: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values with exactly the fields of this class."""
        return {
            "code": self.code,
            "severity": self.severity,
            "message": self.message,
            "where": self.where,
            "found": _plain(self.found),
            "legal": _plain(self.legal),
            "help": self.help,
        }

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        lines = [f"{self.severity} {self.code}{place}: {self.message}"]
        if self.found is not None:
            lines.append(f"  found: {_text(self.found)}")
        if self.legal is not None:
            lines.append(f"  allowed: {_text(self.legal)}")
        if self.help is not None:
            lines.append(f"  fix: {self.help}")
        return "\n".join(lines)


class PlanError(ValueError):
    """The user's plan, model or call cannot be served; ``diagnostics`` says why.

    Its text lists every diagnostic with code, place, value found, values allowed and fix.
    """

    diagnostics: tuple[Diagnostic, ...]

    def __init__(self, diagnostics: Diagnostic | Iterable[Diagnostic]) -> None:
        found = (diagnostics,) if isinstance(diagnostics, Diagnostic) else tuple(diagnostics)
        assert found, "a PlanError needs at least one diagnostic"
        self.diagnostics = found
        super().__init__("\n".join(str(item) for item in found))

    def __reduce__(self) -> tuple[type[PlanError], tuple[tuple[Diagnostic, ...]]]:
        return (type(self), (self.diagnostics,))


def diagnostic(
    code: str,
    *,
    where: str = "",
    found: Any = None,
    legal: Any = None,
    help: str | None = None,  # noqa: A002
    message: str | None = None,
) -> Diagnostic:
    """A ``Diagnostic`` with severity (and, if not given, message and help) of the catalogue."""
    info = CODES[code]
    return Diagnostic(
        code=code,
        severity=info.severity,
        message=info.title if message is None else message,
        where=where,
        found=_frozen(found),
        legal=_frozen(legal),
        help=help,
    )


def errors_in(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Those of severity error, in order."""
    return tuple(item for item in diagnostics if item.severity == "error")


def raise_for_errors(diagnostics: Iterable[Diagnostic]) -> None:
    """Raise one ``PlanError`` with all errors; do nothing if there is none."""
    errors = errors_in(diagnostics)
    if errors:
        raise PlanError(errors)


def _frozen(value: Any) -> Value:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple | set | frozenset | range):
        return tuple(_frozen(item) for item in value)
    return str(value)


def _plain(value: Value) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _text(value: Value) -> str:
    if isinstance(value, tuple):
        return ", ".join(_text(item) for item in value) if value else "nothing"
    return str(value)
