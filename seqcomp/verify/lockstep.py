"""A compiled module on every rank of a plan, in one process: each rank is a thread.

64 ranks fit on a laptop, results are bitwise reproducible, and no process group is made. The
runtime's own code runs; only what carries the bytes differs from real ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from seqcomp.api import attach, of
from seqcomp.lowering.program import ProgramCache
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import ResolvedPlan, resolve
from seqcomp.plan.schema import Plan
from seqcomp.runtime.comm import RankContext
from seqcomp.runtime.threads import run_ranks

T = TypeVar("T")


def lockstep(
    model_fn: Callable[[], torch.nn.Module],
    plan: Plan | Mapping[str, Any] | str | Path,
    fn: Callable[[torch.nn.Module, RankContext, dict[str, Any]], T],
    *,
    inputs: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    device: torch.device | None = None,
    keep_global: bool = False,
    prepare: bool = False,
) -> list[T]:
    """`fn(compiled, context, local_inputs)` on every rank of `plan`; results in order of rank.

    model_fn: must give equal weights each time; called once a rank, before the threads start,
    because torch's random state belongs to the process.
    inputs: the global batch; every rank gets its slice over the data axes, tensors whole where
    they have no batch dim (the plan's `inputs`; by default the first dim is the batch).
    timeout: seconds that a rank waits for another.
    keep_global: programs keep their global graph.
    prepare: `inputs` are the arguments of a call, and weights that are cut before the first call
    are cut for it; otherwise such a call is made up where the model's signature is known.

    Raises the first rank's failure (PlanError for an illegal plan).
    """
    models = [model_fn()]
    paths = [path for path, _ in models[0].named_modules() if path]
    resolved = resolve(load_plan(plan), module_paths=paths)
    sizes = dict(resolved.axes)
    models += [model_fn() for _ in range(math.prod(sizes.values()) - 1)]
    cache = ProgramCache()

    def work(context: RankContext) -> T:
        local = local_inputs(inputs or {}, resolved, context)
        model = attach(
            models[context.rank],
            resolved,
            context,
            cache=cache,
            example_inputs=local if prepare and resolved.tensor_size > 1 else None,
            keep_global=keep_global,
        )
        try:
            return fn(model, context, local)
        finally:
            of(model).close()

    return run_ranks(work, sizes, timeout, device=device)


def local_inputs(
    inputs: Mapping[str, Any], resolved: ResolvedPlan, context: RankContext
) -> dict[str, Any]:
    """What one rank passes of a global batch: its slice over the data axes."""
    part, parts = data_slice(resolved, context)

    def local(name: str, value: Any) -> Any:
        given = resolved.input_spec(name)
        dim = given.batch if given is not None else 0
        if parts == 1 or dim is None or not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return value.chunk(parts, dim)[part].contiguous()

    return {name: local(name, value) for name, value in inputs.items()}


def data_slice(resolved: ResolvedPlan, context: RankContext) -> tuple[int, int]:
    """(index, number) of a rank's batch slice over the data axes."""
    part, parts = 0, 1
    for axis in resolved.batch_axes:
        part = part * context.sizes[axis] + context.coords[axis]
        parts *= context.sizes[axis]
    return part, parts
