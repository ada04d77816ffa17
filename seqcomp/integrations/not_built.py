"""Public functions whose work is not built yet: they say so, with a code."""

from __future__ import annotations

from typing import Any, NoReturn

from seqcomp.diagnostics import PlanError, diagnostic


def explain(model: Any, plan: Any, *, seq_len: int, batch: int = 1, dtype: Any = None) -> NoReturn:
    """What a plan would do to a model: placements, collectives, bytes. Not available yet.

    Raises:
        PlanError: always (SC920).
    """
    del model, plan, seq_len, batch, dtype
    _not_built("explain")


def _not_built(name: str) -> NoReturn:
    raise PlanError(
        diagnostic(
            "SC920",
            where=f"seqcomp.{name}",
            message=f"{name} is not available yet",
            help="validate checks a plan against a model, a length and a world size",
        )
    )
