"""Attention in plain tensor operations: any device, dtype, head dims and mask.

Computes in at least fp32 and holds a whole [B, Hq, Sq, Sk] tile; the reference for the kernels
and the fallback for what they do not take.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``kernels``. ``mask``, broadcastable to [B, Hq, Sq, Sk]: True where a query sees a key,
    or added to the scores.

    A query that sees nothing gets out = 0 and lse = -inf.
    """
    with _full_precision(q.device):
        scores = _scores(q, k, causal=causal, scale=scale, mask=mask)
        lse = scores.logsumexp(-1)  # of -inf alone: -inf
        weights = _weights(scores, lse)
        out = weights @ _per_group(v, weights.dtype)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``kernels``; ``out`` and ``lse`` are those of the whole softmax."""
    with _full_precision(q.device):
        weights = _weights(
            _scores(q, k, causal=causal, scale=scale, mask=mask),
            lse.unflatten(1, (k.shape[1], -1)),
        )
        dout_w = dout.unflatten(1, (k.shape[1], -1)).to(weights.dtype)
        out_w = out.unflatten(1, (k.shape[1], -1)).to(weights.dtype)
        delta = (dout_w * out_w).sum(-1, keepdim=True)
        dv = (weights.mT @ dout_w).sum(2)
        dscores = weights * (dout_w @ _per_group(v, weights.dtype).mT - delta) * scale
        dq = (dscores @ _per_group(k, weights.dtype)).flatten(1, 2)
        dk = (dscores.mT @ q.unflatten(1, (k.shape[1], -1)).to(weights.dtype)).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, *, causal: bool, scale: float, mask: Tensor | None) -> Tensor:
    """[B, Hkv, group, Sq, Sk], -inf where a query does not see a key."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q = q.unflatten(1, (k.shape[1], -1)).to(dtype)
    scores = q @ _per_group(k, dtype).mT * scale
    if causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        mask = seen if mask is None else mask & seen
    if mask is None:
        return scores
    if mask.dim() == 4:
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (k.shape[1], -1))
    if mask.dtype != torch.bool:
        return scores + mask
    return scores.masked_fill(~mask, float("-inf"))


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()


def _per_group(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).unsqueeze(2)


def _full_precision(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, enabled=False)
