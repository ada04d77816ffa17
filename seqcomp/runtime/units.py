"""Gradients of code that runs untraced: every rank must have all of them, whatever its tokens did.

Which parameters a routed token meets is known when it is there: an expert that got no token of this
rank has no gradient here and one elsewhere. Collectives of the backward wait for each other, so
what a rank did not use gets zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqcomp.runtime.comm import Communicator


@contextmanager
def counted_together(
    counters: Sequence[Tensor], comm: Communicator | None, label: str
) -> Iterator[None]:
    """What is added to `counters` in here is the sum of what every rank of `comm` adds.

    Nothing is added when a backward runs code again (checkpoints): it has been counted before.
    """
    before = [counter.clone() for counter in counters]
    if torch._C._current_graph_task_id() != -1:
        try:
            yield
        finally:  # what is run again ends by an exception where nothing more is needed
            with torch.no_grad():
                for counter, start in zip(counters, before, strict=True):
                    counter.copy_(start)
        return
    yield
    if comm is None:
        return
    with torch.no_grad():
        for counter, start in zip(counters, before, strict=True):
            counter.copy_(start + comm.all_reduce(counter - start, label=label))


def run_whole(
    code: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> list[Tensor]:
    """`code(inputs, parameters)`, every floating result of which gives every operand a gradient.

    Zeros for what it does not depend on: on one device an expert without tokens has None.
    """
    operands = [*inputs, *parameters]
    learning = [i for i, x in enumerate(operands) if x.requires_grad]
    if not learning or not torch.is_grad_enabled():
        return code(inputs, parameters)
    *entered, tie = _Enter.apply(*(operands[i] for i in learning))
    for i, x in zip(learning, entered, strict=True):
        operands[i] = x
    results = code(operands[: len(inputs)], operands[len(inputs) :])
    return [_Leave.apply(x, tie) if x.is_floating_point() else x for x in results]


class _Enter(torch.autograd.Function):
    """The operands, and a number that ties results to all of them."""

    @staticmethod
    def forward(ctx: Any, *operands: Tensor) -> tuple[Tensor, ...]:
        return *(x.view_as(x) for x in operands), operands[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[:-1]  # the engine gave zeros for those that are not there


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, tie: Tensor) -> Tensor:
        ctx.tie = tie.dtype
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_zeros((), dtype=ctx.tie)
