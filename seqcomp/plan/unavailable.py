"""The parts of the plan language that are not built yet: one table, one code each.

When a part is built, delete its row. A plan that uses one is refused, never half obeyed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from seqcomp.diagnostics import CODES, Diagnostic, diagnostic
from seqcomp.plan.schema import Plan
from seqcomp.plan.source import Path


def _strategy(name: str) -> Callable[[Plan], list[Path]]:
    return lambda plan: [("strategies", name)] if getattr(plan.strategies, name) else []


def _option(section: str, key: str, default: object) -> Callable[[Plan], list[Path]]:
    """Places where ``strategies.<section>.<key>`` is not the default."""

    def places(plan: Plan) -> list[Path]:
        holder = getattr(plan.strategies, section)
        used = holder is not None and getattr(holder, key) != default
        return [("strategies", section, key)] if used else []

    return places


# (code, a function that gives the places where a plan uses the part)
NOT_AVAILABLE: tuple[tuple[str, Callable[[Plan], list[Path]]], ...] = (
    ("SC901", _strategy("fsdp")),
    ("SC910", _option("data", "gradients", "sum")),
    ("SC911", _option("fsdp", "mixed_precision", "none")),
    ("SC912", _option("fsdp", "offload", "none")),
)


def check_available(plan: Plan) -> Iterator[Diagnostic]:
    """One error per place where the plan uses a part that is not built yet."""
    for code, places in NOT_AVAILABLE:
        for path in places(plan):
            yield diagnostic(
                code,
                where=plan.where(*path),
                help=f"remove it from the plan: {CODES[code].text}",
            )
