"""Dropout of a rank's part by the places that it has in the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqcomp.layout.parts import part
from seqcomp.lowering.ops.base import Op, RankBinding
from seqcomp.runtime import random
from seqcomp.runtime.attention.pair_dropout import PairDropout
from seqcomp.runtime.positions import positions


@dataclass(frozen=True)
class Dealt:
    """A factor of a dim: the axes that deal it out, and whether it is tokens that are padded."""

    axes: tuple[str, ...]
    padded: bool = False

    def places(self, rank: RankBinding, size: int) -> Sequence[range]:
        """Of a rank's elements in the whole, which has `size` without padding."""
        if not self.axes:
            return (range(size),)
        parts, at = rank.place().nested(self.axes)
        layout = rank.layout_over(self.axes)
        size = rank.layout.padded(size) if self.padded else size
        return (part(size, parts, at),) if layout is None else layout.ranges(size, at)


Dims = tuple[tuple[Dealt, ...], ...]


def count(dims: Dims) -> int:
    """How many sizes the factors have."""
    return sum(map(len, dims))


def _indexes(
    dims: Dims, sizes: Sequence[int], rank: RankBinding, device: torch.device
) -> Iterator[tuple[Tensor, int]]:
    """For each dim the places of this rank's elements, and the size of the whole dim.

    A padded token has some place: what becomes of it does not matter.
    """
    left = iter(sizes)
    for dim in dims:
        index, total = torch.zeros(1, dtype=torch.int64, device=device), 1
        for factor in dim:
            size = next(left)
            places = positions(factor.places(rank, size), device)
            index = (index.unsqueeze(1) * size + places).flatten()
            total *= size
        yield index, total


@dataclass(frozen=True)
class Dropout(Op):
    """Operands: the value, the keys of the call, the size of each factor of `dims` in the whole."""

    p: float
    number: int
    dims: Dims
    __name__ = "dropout"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        def dropout(x: Tensor, keys: Tensor, *sizes: int) -> Tensor:
            found = list(_indexes(self.dims, sizes, rank, x.device))
            index, whole = zip(*found, strict=True) if found else ((), ())
            return random.dropout(x, keys[self.number], index, whole, self.p)

        return dropout


@dataclass(frozen=True)
class DropPairs(Op):
    """The dropout of one attention, `dims` of its samples, heads and queries.

    Operands: the keys of the call, the size of each factor, and the number of keys, in the whole.
    """

    p: float
    number: int
    dims: Dims
    __name__ = "drop_pairs"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        def drop_pairs(keys: Tensor, *sizes: int) -> PairDropout:
            assert len(sizes) == count(self.dims) + 1
            found = list(_indexes(self.dims, sizes[:-1], rank, keys.device))
            (samples, b), (heads, h), (queries, n) = found
            whole = (b, h, n, sizes[-1])
            return PairDropout(keys[self.number], self.p, samples, heads, queries, whole)

        return drop_pairs
