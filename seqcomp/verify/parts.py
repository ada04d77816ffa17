"""Which part of a whole value a rank holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor

from seqcomp.capture.sizes import LENGTH_SYMBOL, evaluate
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.lowering.ops import Place
from seqcomp.lowering.parameters import Cut
from seqcomp.placement.spec import Factor, Spec


@dataclass(frozen=True)
class Share:
    """A rank's share of an output: its slice of the batch, and the positions of its tokens."""

    index: int
    number: int
    tokens: Tensor

    def of(self, whole: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The part of `whole` that has `shape`: a dim is whole, a batch slice, or own tokens.

        Raises ValueError for shapes that are no such part.
        """
        part, batch_seen = whole, self.number == 1
        if whole.dim() != len(shape):
            raise ValueError(f"{shape} is no part of {tuple(whole.shape)}")
        for dim, (have, want) in enumerate(zip(whole.shape, shape, strict=True)):
            if have == want:
                continue
            if not batch_seen and want * self.number == have:
                part, batch_seen = part.narrow(dim, self.index * want, want), True
            elif want == len(self.tokens) and int(self.tokens.max()) < have:
                part = part.index_select(dim, self.tokens)
            else:
                raise ValueError(f"{shape} is no part of {tuple(whole.shape)}")
        return part


def own_cut(whole: Tensor, cut: Cut | None, place: Place) -> Tensor:
    """This rank's part of a parameter."""
    if cut is None:
        return whole
    at = _even(whole.shape[cut.dim], place.sizes[cut.axis], place.coords[cut.axis])
    return whole.narrow(cut.dim, at.start, len(at))


def own_part(whole: Tensor, spec: Spec, place: Place, sizes: Mapping[sympy.Symbol, int]) -> Tensor:
    """This rank's part of a value with the placement `spec`, partial sums aside."""
    factors = [(evaluate(factor.size, sizes), factor) for dim in spec.dims for factor in dim]
    part = whole.reshape([size for size, _ in factors])
    for at, (size, factor) in enumerate(factors):
        if factor.axes:
            part = part.index_select(at, torch.tensor(list(positions(size, factor, place))))
    shape, at = [], 0
    for dim in spec.dims:
        shape.append(math.prod(part.shape[at : at + len(dim)]))
        at += len(dim)
    return part.reshape(shape)


def positions(size: int, factor: Factor, place: Place) -> range | list[int]:
    """Global positions that a rank holds of a sharded factor."""
    degree, rank = 1, 0
    for axis in factor.axes:
        degree *= place.sizes[axis]
        rank = rank * place.sizes[axis] + place.coords[axis]
    layout = place.layout_over(factor.axes)
    if layout is None and factor.size == LENGTH_SYMBOL:
        layout = SequenceLayout("contiguous", degree)
    if layout is not None:
        # Padding, which stands at the end, is made of copies of the last token.
        padded = place.layout.padded(size)
        return [min(p, size - 1) for p in layout.token_index(padded, rank)]
    return _even(size, degree, rank)


def _even(size: int, degree: int, rank: int) -> range:
    """The rank-th of `degree` chunks of ceil(size / degree), as DTensor deals them out."""
    chunk = -(-size // degree)
    return range(min(rank * chunk, size), min((rank + 1) * chunk, size))
