"""An operation as data, and the rank that it is bound to."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.comm import RankContext
from seqcomp.runtime.recompute import Recompute


@dataclass(frozen=True)
class RankBinding:
    """All that an operation of one rank needs."""

    context: RankContext
    sequence: tuple[str, ...]
    layout: SequenceLayout
    ring_axis: str | None
    ulysses_axis: str | None
    module: nn.Module  # the root whose units run
    recompute: Recompute

    def layout_over(self, axes: tuple[str, ...]) -> SequenceLayout | None:
        """The layout in which these axes deal out tokens; None is the plain even split.

        The inner axes cut what a ring rank holds into even pieces, so that the outer ones alone
        hold the concatenation of those pieces, in the same layout.
        """
        return self.place().layout_over(axes)

    def tokens_over(self, axes: tuple[str, ...]) -> SequenceLayout:
        """`layout_over`, with the plain even split as what it is: contiguous."""
        size = math.prod(self.context.sizes[a] for a in axes)
        return self.layout_over(axes) or SequenceLayout("contiguous", size)

    def padded(self, length: int | None) -> int | None:
        """The length to which a sequence of `length` tokens is padded; None stays None."""
        return None if length is None else self.layout.padded(length)

    def place(self) -> Place:
        """Where this rank is, as plain data."""
        context = self.context
        return Place(context.sizes, context.coords, self.sequence, self.layout, self.ring_axis)


@dataclass(frozen=True)
class Place:
    """A rank's place in the mesh, and how the mesh deals out tokens. Can be pickled."""

    sizes: Mapping[str, int]
    coords: Mapping[str, int]
    sequence: tuple[str, ...]
    layout: SequenceLayout
    ring_axis: str | None

    def nested(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """(size, this rank's place) of the joint group over `axes`, the last of them fastest."""
        size, at = 1, 0
        for axis in axes:
            size, at = size * self.sizes[axis], at * self.sizes[axis] + self.coords[axis]
        return size, at

    def layout_over(self, axes: tuple[str, ...]) -> SequenceLayout | None:
        """As `RankBinding.layout_over`."""
        if not axes or axes != self.sequence[: len(axes)] or axes[0] != self.ring_axis:
            return None
        inner = math.prod(self.sizes[a] for a in axes[1:])
        return SequenceLayout(self.layout.kind, self.layout.ring, inner)


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
