"""Shapes of published models by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from seqcomp.cost.shape import ModelShape
from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.plan.nearest import nearest

_FILE = Path(__file__).parent / "models.yaml"


def known_models() -> tuple[str, ...]:
    """Names that `load_shape` knows."""
    return tuple(_read())


def module_spec(name: str) -> str | None:
    """The spec of the code of a published model, such as ``hf:LlamaForCausalLM?...``, where there
    is one."""
    return _read().get(name, {}).get("module")


def load_shape(name: str) -> ModelShape:
    """The shape of a published model.

    Raises:
        PlanError: SC020 for a name that is not known.
    """
    known = _read()
    if name not in known:
        close = nearest(name, known)
        raise PlanError(
            diagnostic(
                "SC020",
                where="model",
                message=f"{name[:200]!r} is neither a known shape nor a model spec",
                found=name[:200],
                legal=(*known, "hf:...", "titan:...", "python:..."),
                help=f"did you mean {close}?" if close else None,
            )
        )
    sizes = {key: value for key, value in known[name].items() if key not in ("source", "module")}
    return ModelShape.decoder(name=name, **sizes)


def _read() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return found
