"""The gradient through an attention's log-sum-exp, for kernels that know nothing of it.

dS = P * (dout v^T - delta + dlse) with delta = sum(dout * out): one more column of out, -dlse,
against one of dout, 1, makes kernels subtract delta - dlse in its place. The same column of q, k
and v is 0. In half precision dlse takes several columns, whose sum is exact to fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS = 8
"""Fused kernels want head dims in multiples of it."""

_PARTS = 3


def columns(dpacked: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangent [B, H, s, dv + 1] of (out, lse) and out [B, H, s, dv] -> dout and out with
    COLUMNS more columns, in the dtype of out."""
    dlse = dpacked[..., -1:]
    parts = []
    for _ in range(_PARTS):
        part = dlse.to(out.dtype)
        parts.append(-part)
        dlse = dlse - part
    ones = torch.ones_like(torch.cat(parts, -1))
    rest = out.new_zeros((*out.shape[:-1], COLUMNS - _PARTS))
    dout = dpacked[..., :-1].to(out.dtype)
    return torch.cat((dout, ones, rest), -1), torch.cat((out, *parts, rest), -1)
