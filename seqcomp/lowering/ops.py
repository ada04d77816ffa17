"""What a lowered graph calls besides ATen, as data; `bind` turns it into a function of one rank.

A program is lowered once and is the same for every rank: only these operations know ranks, and
only once bound. Each counts its bytes under the module path in `label`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqcomp.layout.masks import Mask
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime import collectives
from seqcomp.runtime.attention import AttentionPlan, Transport, attention
from seqcomp.runtime.collectives import Cotangent
from seqcomp.runtime.comm import RankContext


@dataclass(frozen=True)
class RankBinding:
    """All that an operation of one rank needs."""

    context: RankContext
    sequence: tuple[str, ...]
    layout: SequenceLayout
    ring_axis: str | None
    ulysses_axis: str | None

    def layout_over(self, axes: tuple[str, ...]) -> SequenceLayout | None:
        """The layout in which these axes deal out tokens; None is the plain even split.

        The innermost axes cut what their outer ranks hold into even pieces.
        """
        return self.layout if axes and axes == self.sequence else None


class Op(ABC):
    """A graph operation that must be bound to a rank before it runs."""

    __name__ = "seqcomp_op"

    def __call__(self, *args: Any) -> Any:
        raise AssertionError(f"{self} is not bound to a rank")

    @abstractmethod
    def bind(self, rank: RankBinding) -> Callable[..., Any]: ...

    def axes_used(self) -> tuple[str, ...]:
        """The joint group that the operation talks to; empty for none."""
        return ()


@dataclass(frozen=True)
class Shard(Op):
    """Replicate -> Shard(dim) over axes: local."""

    dim: int
    axes: tuple[str, ...]
    __name__ = "shard"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm, layout = rank.context.comm(self.axes), rank.layout_over(self.axes)
        return lambda x: collectives.shard(x, self.dim, comm, layout)

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class Gather(Op):
    """Shard(dim) over axes -> Replicate, global token order."""

    dim: int
    axes: tuple[str, ...]
    cotangent: Cotangent
    label: str = ""
    __name__ = "all_gather"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm, layout = rank.context.comm(self.axes), rank.layout_over(self.axes)
        return lambda x: collectives.gather(
            x, self.dim, comm, layout, cotangent=self.cotangent, label=self.label
        )

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class AllReduce(Op):
    """Partial over axes -> Replicate."""

    axes: tuple[str, ...]
    cotangent: Cotangent
    label: str = ""
    __name__ = "all_reduce"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        return lambda x: collectives.all_reduce(x, comm, cotangent=self.cotangent, label=self.label)

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class OwnCotangent(Op):
    """Identity at a module's output: a replicated cotangent becomes partial over axes."""

    axes: tuple[str, ...]
    __name__ = "own_cotangent"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        return lambda x: collectives.own_cotangent(x, comm)

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class SumGradient(Op):
    """Identity on a value that axes replicate from outside: its cotangent is summed over them."""

    axes: tuple[str, ...]
    label: str = ""
    __name__ = "sum_gradient"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)

        def sum_gradient(x: Tensor) -> Tensor:
            if not (x.requires_grad and torch.is_grad_enabled()):
                return x
            return collectives.sum_gradient(x, comm, label=self.label)

        return sum_gradient

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class Attention(Op):
    """Attention over sharded tokens: Ulysses inside, ring outside."""

    mask: Mask
    scale: float
    transport: Transport
    label: str
    __name__ = "attention"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        def comm(axis: str | None) -> Any:
            return rank.context.comm((axis,)) if axis in rank.sequence else None

        ring, ulysses = comm(rank.ring_axis), comm(rank.ulysses_axis)
        plan = AttentionPlan(self.mask, rank.layout, self.transport, self.scale)

        def sharded_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, plan, ring=ring, ulysses=ulysses, label=self.label)

        return sharded_attention


@dataclass(frozen=True, eq=False)
class Constant(Op):
    """A tensor that the capture lifted out of the code."""

    value: Tensor
    __name__ = "constant"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        value = self.value.to(rank.context.device)
        return lambda: value
