"""seqcomp: a declarative compiler for sequence parallelism in PyTorch.

``model = seqcomp.parallelize(model, plan)`` spreads the sequence of a model over the ranks of
a device mesh as a plan says; the result computes what the original computes. Names are
imported on first use, so that plans can be checked without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqcomp.api import of, parallelize
    from seqcomp.diagnostics import Diagnostic, PlanError
    from seqcomp.integrations.explain import explain
    from seqcomp.integrations.validate import validate
    from seqcomp.plan.load import load_plan
    from seqcomp.plan.schema import Plan
    from seqcomp.verify.run import verify

__version__ = "0.1.0"

__all__ = [
    "Diagnostic",
    "Plan",
    "PlanError",
    "explain",
    "load_plan",
    "of",
    "parallelize",
    "validate",
    "verify",
]


def _home(name: str) -> str | None:
    """The module that defines a public name."""
    match name:
        case "Diagnostic" | "PlanError":
            return "seqcomp.diagnostics"
        case "Plan":
            return "seqcomp.plan.schema"
        case "load_plan":
            return "seqcomp.plan.load"
        case "validate":
            return "seqcomp.integrations.validate"
        case "parallelize" | "of":
            return "seqcomp.api"
        case "explain":
            return "seqcomp.integrations.explain"
        case "verify":
            return "seqcomp.verify.run"
    return None


def __getattr__(name: str) -> Any:
    home = _home(name)
    if home is None:
        raise AttributeError(f"module 'seqcomp' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
