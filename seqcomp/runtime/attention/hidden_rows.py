"""Rows of a mask that a huge finite number hides whole: their output is the mean of all values.

Such a number swallows the scores, and in a log-sum-exp also the logarithm of how many keys there
are, so that parts could neither be merged nor differentiated. These rows are computed without the
number instead, as if their queries were 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqcomp.runtime.attention import math_kernel
from seqcomp.runtime.attention.merge import accumulator_dtype
from seqcomp.runtime.attention.score_tile import Modified

Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class HiddenRows:
    """An additive mask [B, H, q, k] some of whose rows hide every key of the whole sequence.

    mask: with the largest number of such a row taken off; base [B, H, q]: that number, inf for
    other rows; filled: pairs whose number takes the place of the score instead of being added to
    it, so that the score has no derivative. All but `mask.shape[-1]` broadcast.
    """

    mask: Tensor
    base: Tensor
    filled: Tensor | None = None

    @staticmethod
    def lifted(
        mask: Tensor, best: Tensor, filled: Callable[[], Tensor | None]
    ) -> Tensor | HiddenRows:
        """`mask` itself where all rows see something; best: the largest number of each row that
        does not, inf or -inf for others."""
        own = best.isfinite()
        if not bool(own.any()):
            return mask
        off = best.masked_fill(~own, 0.0).unsqueeze(-1)
        # In fp64: one over the smallest number of a dtype is not in it.
        return HiddenRows(mask.double() - off, best.masked_fill(~own, torch.inf), filled())

    def swallowed(self, like: Tensor) -> Tensor:
        """[B, H, q, 1]: whether the scores of a row are lost in its numbers."""
        lost = self.base.isfinite()
        if self.filled is None:
            precision = torch.finfo(accumulator_dtype(like.dtype)).eps
            lost = lost & (self.base.abs() * precision > 16)
        return lost.unsqueeze(-1)


@dataclass(frozen=True)
class _LostScores(Modified):
    """Scores of which nothing is left but `numbers` [.., q, k]; their derivative is that of the
    softcap, 0 where `filled`."""

    numbers: Tensor
    filled: Tensor | None
    softcap: float

    def of(self, scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        slope = torch.ones_like(scores)
        if self.softcap:
            slope = 1 - (scores / self.softcap).tanh().square()
        if self.filled is not None:
            slope = slope.masked_fill(_rows(self.filled, rows), 0.0)
        return _rows(self.numbers, rows).to(scores.dtype).expand(scores.shape), slope


def _rows(x: Tensor, rows: slice) -> Tensor:
    return x[:, :, rows] if x.shape[2] > 1 else x


def forward(
    inner: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: HiddenRows,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """As `inner`, a kernel's forward; the log-sum-exp of hidden rows is without their base."""
    return inner(q.masked_fill(mask.swallowed(q), 0.0), k, v, mask=mask.mask, **how)


def backward(
    inner: Callable[..., Grads],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: HiddenRows,
    softcap: float,
    **how: Any,
) -> Grads:
    """As `inner`, a kernel's backward: only scores are lost, not their derivatives."""
    lost = mask.swallowed(q)
    quiet = q.masked_fill(lost, 0.0)
    dq, dk, dv = inner(dout, quiet, k, v, out, lse, mask=mask.mask, **how)
    alone = _LostScores(mask.mask.masked_fill(~lost, float("-inf")), mask.filled, softcap)
    own, more, _ = math_kernel.backward(dout, q, k, v, out, lse, mask=alone, **how)
    return torch.where(lost, own, dq), dk + more, dv
