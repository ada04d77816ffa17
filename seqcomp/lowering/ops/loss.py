"""The loss that is computed with its head, some tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqcomp.lowering.ops.base import Op, RankBinding
from seqcomp.lowering.ops.compute import VocabularyLoss
from seqcomp.runtime.chunked_loss import Head, SharedLoss, TokenLoss, WholeLoss, chunked_loss
from seqcomp.runtime.tensor_parallel import Regathered


@dataclass(frozen=True)
class Step:
    """An element-wise function of one tensor, with its other arguments."""

    target: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self.target(x, *self.args, **dict(self.kwargs))
        return result


@dataclass(frozen=True, eq=False)
class ChunkedLoss(Op):
    """Cross-entropy of `steps(linear(x))`, in chunks of tokens.

    Operands: x, of a gathered x its shard and the promise to gather it again (as `ColumnLinear`),
    targets, weights of classes. `shared`: the loss where axes cut the classes. `reduce`: the sum
    of the losses instead of one for each target.
    """

    chunks: int
    steps: tuple[Step, ...]
    shared: VocabularyLoss | None
    ignore_index: int
    smoothing: float
    reduce: bool
    dtype: torch.dtype
    __name__ = "chunked_loss"

    def after(self, x: Tensor) -> Tensor:
        """Logits from what the linear gives."""
        for step in self.steps:
            x = step(x)
        return x

    def each(self, logits: Tensor, target: Tensor, classes: Tensor | None) -> Tensor:
        """[n, V] logits of all classes and [n] targets -> [n] losses."""
        return torch.nn.functional.cross_entropy(
            logits,
            target,
            classes,
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.smoothing,
        )

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.shared.axes) if self.shared is not None else None

        def loss(classes: Tensor | None) -> TokenLoss:
            if self.shared is not None and comm is not None:
                own = self.shared
                return SharedLoss(comm, own.words, own.ignore_index, self.dtype, own.label)
            return WholeLoss(lambda logits, target: self.each(logits, target, classes))

        def run(
            x: Tensor,
            shard: Tensor | None,
            weight: Tensor,
            bias: Tensor | None,
            again: Regathered | None,
            target: Tensor,
            classes: Tensor | None,
        ) -> Tensor:
            head = Head(self.chunks, self.after, loss(classes))
            each = chunked_loss(x, weight, bias, target, head, shard, again)
            return each.sum() if self.reduce else each

        return run

    def axes_used(self) -> tuple[str, ...]:
        return self.shared.axes if self.shared is not None else ()
