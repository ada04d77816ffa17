"""Operations along the sharded sequence that need little of what other ranks hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqcomp.capture.windows import Window
from seqcomp.layout.neighbours import Neighbours, neighbours
from seqcomp.lowering.ops.base import Op, RankBinding
from seqcomp.runtime.neighbours import windowed
from seqcomp.runtime.picked import Lookup, tokens_at
from seqcomp.runtime.running_sum import running_sum


@dataclass(frozen=True)
class Windowed(Op):
    """What looks at neighbouring tokens, on a shard; operands as those of `window`."""

    window: Window
    axes: tuple[str, ...]
    label: str = ""
    __name__ = "windowed"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm, layout, window = (
            rank.context.comm(self.axes),
            rank.tokens_over(self.axes),
            self.window,
        )

        @functools.lru_cache(maxsize=4)
        def plan_of(length: int) -> Neighbours:
            return neighbours(layout, length, window.low, window.high, window.fill is None)

        def run(x: Tensor, *others: Any) -> Tensor:
            return windowed(
                x, window.dim, comm, plan_of(x.shape[window.dim] * comm.size),
                fill=window.fill or 0.0,
                inner=lambda seen: window.apply(seen, others), label=self.label,
            )  # fmt: skip

        return run

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class RunningSum(Op):
    """cumsum over tokens that axes share out."""

    dim: int
    axes: tuple[str, ...]
    dtype: torch.dtype | None = None
    label: str = ""
    __name__ = "running_sum"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm, layout = rank.context.comm(self.axes), rank.tokens_over(self.axes)
        return lambda x: running_sum(x, self.dim, comm, layout, dtype=self.dtype, label=self.label)

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class TokensAt(Op):
    """Tokens at positions, as summands over the ranks; sends nothing.

    Operands: the shard, the positions (a tensor, or a list of numbers), the length without padding.
    """

    dim: int
    axes: tuple[str, ...]
    how: Lookup
    __name__ = "tokens_at"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm, layout = rank.context.comm(self.axes), rank.tokens_over(self.axes)

        def run(x: Tensor, index: Any, length: int) -> Tensor:
            if isinstance(index, list):
                index = torch.tensor(index, device=x.device)
            own = layout.ranges(x.shape[self.dim] * comm.size, comm.rank)
            return tokens_at(x, self.dim, index, length, own, self.how)

        return run

    def axes_used(self) -> tuple[str, ...]:
        return self.axes
