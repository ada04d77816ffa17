"""What every rank does for the verifier, whatever carries it. Jobs can be pickled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from seqcomp.api import of
from seqcomp.capture.call import bind_call, signature_of
from seqcomp.capture.facts import makes_cache
from seqcomp.lowering.program import original_forward
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import data_slice
from seqcomp.verify.observe import ModelFn, RankObservation, observe_rank
from seqcomp.verify.trace import RankTrace, trace_rank, trace_whole

InputsFn = Callable[[], Mapping[str, Any]]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Observe:
    """Forward and backward of the compiled model. `shapes`: of the outputs of one device."""

    shapes: Shapes

    def __call__(
        self, model: nn.Module, context: RankContext, local: Mapping[str, Any]
    ) -> RankObservation:
        data = data_slice(of(model).resolved, context)
        return observe_rank(model, local, self.shapes, data, context.rank)


@dataclass(frozen=True)
class TraceValues:
    """Every value of the local graph; rank 0 also runs the global graph."""

    shapes: Shapes
    model_fn: ModelFn
    inputs_fn: InputsFn

    def __call__(
        self, model: nn.Module, context: RankContext, local: Mapping[str, Any]
    ) -> RankTrace:
        resolved = of(model).resolved
        data = data_slice(resolved, context)
        traced, program = trace_rank(model, local, self.shapes, data, context.rank)
        if context.rank:
            return traced
        # The call of the whole batch flattens to the same leaves in the same order.
        forward = original_forward(model)
        call = bind_call(
            signature_of(forward), (), dict(self.inputs_fn()),
            where=type(model).__name__, stateless=makes_cache(model, forward),
        )  # fmt: skip
        axes = tuple(a for a, n in resolved.axes.items() if n > 1)
        whole = trace_whole(program, self.model_fn, call.leaves, self.shapes, axes)
        return replace(traced, whole=whole)
