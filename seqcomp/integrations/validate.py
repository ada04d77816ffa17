"""``seqcomp.validate``: everything that can be said about a plan before any process starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seqcomp.cost.named import load_shape
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic, errors_in
from seqcomp.plan.facts import ModelFacts
from seqcomp.plan.load import read_plan
from seqcomp.plan.reader import describe
from seqcomp.plan.rules import check_plan
from seqcomp.plan.schema import Plan

if TYPE_CHECKING:
    from torch import nn


def validate(
    plan: Any,
    model: nn.Module | str | None = None,
    *,
    world_size: int | None = None,
    seq_len: int | None = None,
) -> list[Diagnostic]:
    """All errors, warnings and notes about a plan; an empty list or no error means legal.

    Args:
        plan: path, preset name, YAML text, dict or ``Plan``.
        model: a module, or a spec such as ``hf:LlamaForCausalLM?num_hidden_layers=2``; without
            it the rules about heads and masks are left out, and torch is not imported.
        world_size: number of processes to check the mesh against.
        seq_len: full sequence length in tokens.

    Never raises for what a user may pass, and needs no processes.
    """
    return run_validation(plan, model, world_size=world_size, seq_len=seq_len).diagnostics


@dataclass(frozen=True)
class Validation:
    """Diagnostics, the plan if it could be read, and what the model raised, if it did."""

    diagnostics: list[Diagnostic]
    plan: Plan | None
    cause: BaseException | None

    @property
    def ok(self) -> bool:
        """Nothing of severity error was found."""
        return not errors_in(self.diagnostics)


def run_validation(
    plan: Any, model: Any = None, *, world_size: Any = None, seq_len: Any = None
) -> Validation:
    """``validate`` with its by-products."""
    reading = read_plan(plan)
    found = list(reading.diagnostics)
    world, bad_world = count_of("world_size", world_size)
    length, bad_length = count_of("seq_len", seq_len)
    found += [*bad_world, *bad_length]
    facts: ModelFacts | None = None
    paths: Iterable[str] | None = None
    cause: BaseException | None = None
    if model is not None:
        try:
            facts, paths = _facts(model)
        except PlanError as error:
            found += error.diagnostics
            cause = error
    if reading.draft is not None:
        sized = reading.sizes_known
        found += check_plan(
            reading.draft,
            facts if sized else None,
            world_size=world if sized else None,
            seq_len=length if sized else None,
            module_paths=paths,
        )
    return Validation(found, reading.plan, cause)


def count_of(name: str, value: Any) -> tuple[int | None, list[Diagnostic]]:
    """`value` where it is a count, and what is wrong with it (SC010) where it is not."""
    if value is None:
        return None, []
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value, []
    bad = diagnostic(
        "SC010", where=name, message=f"{name} is not a count", found=describe(value),
        legal="a whole number of at least 1",
    )  # fmt: skip
    return None, [bad]


def _facts(model: Any) -> tuple[ModelFacts, list[str] | None]:
    if isinstance(model, str) and ":" not in model:
        return load_shape(model).facts, None
    from seqcomp.integrations.models import build_model

    where = model if isinstance(model, str) else type(model).__name__
    module = build_model(model) if isinstance(model, str) else model
    try:
        from seqcomp.capture.facts import model_facts

        # Of all blocks: one may choose its mask by its own number, which nothing outside shows.
        return model_facts(module), [name for name, _ in module.named_modules()]
    except PlanError:
        raise
    except Exception as error:
        # A model is arbitrary code: whatever it raises is a finding about it.
        reason = f"{type(error).__name__}: {error}"[:500]
        raise PlanError(diagnostic("SC022", where=where, found=reason)) from error
