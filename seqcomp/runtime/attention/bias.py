"""Masks as fused kernels take them: added to the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from seqcomp.runtime.attention.merge import accumulator_dtype


def additive(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """An additive mask [B or 1, Hq or 1, Sq, Sk].

    In the accumulator's dtype: the CPU kernel silently misreads a narrower one for fp64.
    """
    mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    dtype, shape = accumulator_dtype(q.dtype), (*mask.shape[:2], q.shape[2], k.shape[2])
    if mask.dtype == dtype and mask.shape == shape and mask.is_contiguous():
        return mask
    if mask.dtype != torch.bool:
        return mask.to(dtype).expand(shape).contiguous()
    bias = torch.zeros(shape, dtype=dtype, device=q.device)
    return bias.masked_fill_(~mask, float("-inf"))


def sees_nothing(bias: Tensor) -> Tensor:
    return bias.amax(-1) == float("-inf")


def finite(lse: Tensor) -> Tensor:
    """exp(score - lse) must be 0 for a query that has seen nothing: its scores are all -inf."""
    return lse.masked_fill(lse == float("-inf"), 0.0).contiguous()


def aligned(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """An additive mask [B, Hq, Sq, Sk] in the dtype of q whose rows start at multiples of 16."""
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    room = q.new_zeros((*shape[:3], -(-shape[3] // 16) * 16))
    bias = room[..., : shape[3]]
    mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    if mask.dtype == torch.bool:
        return bias.masked_fill_(~mask, float("-inf"))
    return bias.copy_(mask)
