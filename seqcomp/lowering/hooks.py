"""Hooks on modules that would never run: refused, not forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.lowering import ops
from seqcomp.lowering.program import Program

# Those of transformers collect outputs while its own forward runs, as in a capture; the watch for
# values that are not finite looks at the modules around, too.
_MISSED_BY_NOBODY = {"transformers.utils.output_capturing", "seqcomp.training.nonfinite"}


def refuse_hooks(module: torch.nn.Module) -> None:
    """Raises PlanError SC306 for hooks that are there before a capture."""
    hooked = [path or "<root>" for path, sub in module.named_modules() if _is_hooked(sub)]
    if hooked:
        raise PlanError(
            [
                diagnostic(
                    "SC306",
                    where=path,
                    found="hooks registered before the capture",
                    legal="modules without hooks",
                    help="remove the hooks, compile, and register them again",
                )
                for path in hooked
            ]
        )


def uncalled(program: Program) -> tuple[str, ...]:
    """Modules whose work a program does without calling them: those inside MLPs in chunks."""
    merged = (n.target.inside for n in program.flat.nodes if isinstance(n.target, ops.ChunkedMlp))
    return tuple(dict.fromkeys(path for inside in merged for path in inside))


def refuse_uncalled(modules: Mapping[str, torch.nn.Module]) -> None:
    """Raises PlanError SC306 for hooks on modules, given by path, that are not called."""
    hooked = [path for path, module in modules.items() if _is_hooked(module)]
    if hooked:
        raise PlanError(
            [
                diagnostic(
                    "SC306",
                    message="a hook would not run",
                    where=path,
                    found="a hook on a module inside an MLP that runs in chunks of tokens",
                    legal="hooks on modules that are called: the MLP itself, its block",
                    help="remove the hook, or use memory: {checkpoint: block}",
                )
                for path in hooked
            ]
        )


def _is_hooked(module: torch.nn.Module) -> bool:
    return any(getattr(h, "__module__", "") not in _MISSED_BY_NOBODY for h in _hooks_of(module))


def _hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()
    yield from module._backward_hooks.values()
    yield from module._backward_pre_hooks.values()
