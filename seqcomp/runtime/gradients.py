"""Gradients of parameters that ranks replicate: summed in buckets, while the backward goes on.

A bucket is two nodes of the autograd graph around the uses of its parameters. The one next to the
uses runs when the gradients of all of them are there, and starts one all-reduce. The one next to
the parameters is made at the top of the forward; the engine runs first what was made last, so it
waits for the sum when all else is done. It returns complete gradients, so whatever torch does
with gradients sees them whole: ``.grad``, ``autograd.grad``, hooks, accumulation, retained graphs,
recomputation. Several uses of a parameter are added up first and go round once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqcomp.runtime.comm import Communicator, Pending
from seqcomp.runtime.local import Placed, bare


class GradientBucket:
    """The sum over ``comm`` of the gradients of some parameters, in fp32 for narrower ones."""

    def __init__(self, comm: Communicator, label: str) -> None:
        self._comm = comm
        self._label = label
        self._given: list[tuple[torch.Size, torch.dtype] | None] = []
        self._sum: Pending | None = None

    def open(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Local tensors of the parameters; made before anything that uses them is."""
        return _each(parameters, lambda some: _Await.apply(self, *some), bare)

    def fill(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors, whose gradients are sent off together; right before their uses."""
        return _each(values, lambda some: _Start.apply(self, *some), lambda value: value)

    def start(self, gradients: Sequence[Tensor | None]) -> None:
        """Post the sum. None is for a value outside of this backward, on every rank."""
        self._given = [None if g is None else (g.shape, g.dtype) for g in gradients]
        flat = [g.reshape(-1) for g in gradients if g is not None]
        if flat:
            whole = flat[0] if len(flat) == 1 else torch.cat(flat)
            wide = whole.float() if whole.dtype.itemsize < 4 else whole
            self._sum = self._comm.start_all_reduce(wide, phase="backward", label=self._label)

    def finish(self) -> list[Tensor | None]:
        """Wait for the sum, and take it apart."""
        given, pending, self._given, self._sum = self._given, self._sum, [], None
        if pending is None:
            return [None] * len(given)
        (total,) = pending.wait()
        parts = iter(total.split([shape.numel() for shape, _ in filter(None, given)]))
        return [None if one is None else next(parts).view(one[0]).to(one[1]) for one in given]


def _each(values: Sequence[Tensor], apply: Any, plain: Any) -> list[Tensor]:
    """`apply` to those that need a gradient, all at once, and `plain` to the others."""
    learning = [value for value in values if value.requires_grad]
    results = iter(apply(learning) if learning else ())
    return [next(results) if value.requires_grad else plain(value) for value in values]


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: GradientBucket, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bucket, ctx.placed = bucket, [Placed(p) for p in parameters]
        return tuple(bare(p) for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        sums = ctx.bucket.finish()
        whole = [
            None if g is None else placed(g) for placed, g in zip(ctx.placed, sums, strict=True)
        ]
        return None, *whole


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: GradientBucket, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bucket = bucket
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.bucket.start(gradients)
        # Stand-ins of no size in memory: the sums are on their way, and _Await has them.
        marks = [None if g is None else g.new_zeros(()).expand(g.shape) for g in gradients]
        return None, *marks
