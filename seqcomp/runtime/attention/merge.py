"""Merging partial softmaxes: (out, lse) of disjoint key sets -> (out, lse) of their union.

m' = max(m, m_b), l' = l exp(m - m') + l_b exp(m_b - m') and likewise for out (Milakov and
Gimelshein, 2018; Dao et al., FlashAttention, 2022), written with lse = m + log l: the new part
enters with weight sigmoid(lse_b - lse). Accumulators are fp32, or fp64 for fp64 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqcomp.runtime.attention.untouched import Untouched


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part into the accumulators in place.

    out, part [..., S, d]; lse, part_lse [..., S]; -inf where a row has seen nothing, on either
    side or on both.
    """
    # -inf minus -inf: neither side has seen anything, so nothing is added.
    gap = (part_lse - lse).nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    out.lerp_(part.to(out.dtype), gap.sigmoid_().unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


class SoftmaxAccumulator:
    """Collects the parts of one attention; rows that no part covers end as out = 0, lse = -inf."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._given: tuple[Tensor, ...] = ()  # of the first part, where it is the accumulator
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._untouched = Untouched(rows)

    def add(self, start: int, stop: int, out: Tensor, lse: Tensor) -> None:
        """Merge a part for the rows [start, stop); leaves ``out`` and ``lse`` as they are."""
        dtype = accumulator_dtype(out.dtype)
        first = self._untouched.take(start, stop)
        if self._out is None and (start, stop) == (0, self._rows):
            self._out, self._lse, self._given = out.to(dtype), lse.to(dtype), (out, lse)
            return
        if self._out is None:
            self._allocate(out, dtype)
        assert self._out is not None
        assert self._lse is not None
        # A caller's selective checkpoint may hold what the kernel returned.
        self._out, self._lse = (
            x.clone() if any(x is given for given in self._given) else x
            for x in (self._out, self._lse)
        )
        self._given = ()
        own, own_lse = self._out[..., start:stop, :], self._lse[..., start:stop]
        if first == [range(start, stop)]:
            own.copy_(out)
            own_lse.copy_(lse)
            return
        self._clear(first)
        merge_(own, own_lse, out, lse.to(dtype))

    def result(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(out in accumulator dtype, lse); ``like`` [..., S, d] shapes a result without parts."""
        if self._out is None:
            self._allocate(like, accumulator_dtype(like.dtype))
        assert self._out is not None
        assert self._lse is not None
        self._clear(self._untouched.take(0, self._rows))
        return self._out, self._lse

    def _allocate(self, like: Tensor, dtype: torch.dtype) -> None:
        *batch, heads, _, width = like.shape
        shape = (*batch, self._rows, heads, width)
        # The heads of a token side by side, as in what kernels return.
        self._out = like.new_empty(shape, dtype=dtype).transpose(-3, -2)
        self._lse = like.new_empty(shape[:-1], dtype=dtype).transpose(-2, -1)

    def _clear(self, ranges: list[range]) -> None:
        assert self._out is not None
        assert self._lse is not None
        for own in ranges:
            self._out[..., own.start : own.stop, :] = 0
            self._lse[..., own.start : own.stop] = float("-inf")
