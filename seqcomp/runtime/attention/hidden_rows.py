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

Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class HiddenRows:
    """An additive mask [B, H, q, k] some of whose rows hide every key of the whole sequence.

    mask: with the largest number of such a row taken off; base [B, H, q]: that number, inf for
    other rows. All but `mask.shape[-1]` broadcast.
    """

    mask: Tensor
    base: Tensor

    @staticmethod
    def lifted(mask: Tensor, best: Tensor) -> Tensor | HiddenRows:
        """`mask` itself where all rows see something; best: the largest number of each row that
        does not, inf or -inf for others."""
        own = best.isfinite()
        if not bool(own.any()):
            return mask
        off = best.masked_fill(~own, 0.0).unsqueeze(-1)
        # In fp64: one over the smallest number of a dtype is not in it.
        return HiddenRows(mask.double() - off, best.masked_fill(~own, torch.inf))

    def swallowed(self, like: Tensor) -> Tensor:
        """[B, H, q, 1]: whether the scores of a row are lost in its numbers."""
        precision = torch.finfo(accumulator_dtype(like.dtype)).eps
        lost = self.base.isfinite() & (self.base.abs() * precision > 16)
        return lost.unsqueeze(-1)


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
    **how: Any,
) -> Grads:
    """As `inner`, a kernel's backward: only scores are lost, not their derivatives."""
    lost = mask.swallowed(q)
    quiet = q.masked_fill(lost, 0.0)
    dq, dk, dv = inner(dout, quiet, k, v, out, lse, mask=mask.mask, **how)
    # What the queries that were 0 give to dk.
    only, others = q.masked_fill(~lost, 0.0), mask.mask.masked_fill(~lost, float("-inf"))
    zeros = torch.zeros_like(k)
    _, more, _ = math_kernel.backward(dout, only, zeros, v, out, lse, mask=others, **how)
    return dq, dk + more, dv
