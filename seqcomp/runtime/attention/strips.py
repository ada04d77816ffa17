"""A tile of a band in strips of rows, for kernels that take a tensor as their mask: what no row of
a strip sees is not computed.

Shapes as in `kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqcomp.runtime.attention.band_mask import BandMask
from seqcomp.runtime.attention.merge import accumulator_dtype

Grads = tuple[Tensor, Tensor, Tensor]


def forward(
    inner: Callable[..., tuple[Tensor, Tensor]],
    rows: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: BandMask,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """``inner``: a kernel's forward; ``rows`` of a strip, 0 for all."""
    shape = (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    out = q.new_zeros(shape).transpose(1, 2)  # the heads of a token side by side
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulator_dtype(q.dtype))
    for own, keys, strip in mask.strips(rows):
        if strip.columns:
            tensors = (q[:, :, own], k[:, :, keys], v[:, :, keys])
            part = inner(*tensors, mask=strip.whole(), **_of_strip(how, own, keys))
            out[:, :, own], lse[:, :, own] = part
    return out, lse


def backward(
    inner: Callable[..., Grads],
    columns: int,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: BandMask,
    into: Grads,
    **how: Any,
) -> None:
    """``inner``: a kernel's backward; adds to ``into``, dq, dk and dv in accumulator dtype.

    Strips of columns: of dk and dv, two tensors, each gets one part then.
    """
    for keys, own, turned in mask.transposed.strips(columns):
        strip = turned.transposed
        if not strip.rows:
            continue
        own_dout, own_q, own_out, own_lse = (x[:, :, own] for x in (dout, q, out, lse))
        tensors = (own_dout, own_q, k[:, :, keys], v[:, :, keys], own_out, own_lse)
        parts = inner(*tensors, mask=strip.whole(), **_of_strip(how, own, keys))
        for total, at, part in zip(into, (own, keys, keys), parts, strict=True):
            total[:, :, at] += part


def _of_strip(how: dict[str, Any], rows: slice, keys: slice) -> dict[str, Any]:
    if how.get("dropout") is None:
        return how
    return {**how, "dropout": how["dropout"].part(rows, keys)}
