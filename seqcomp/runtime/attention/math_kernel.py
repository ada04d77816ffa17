"""Attention in plain tensor operations: any device, dtype, head dims, mask, softcap, score mod and
dropout.

Computes in at least fp32, a few rows at a time, so that memory stays O(tile); the reference for
the kernels and the fallback for what they do not take.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from seqcomp.runtime.attention.pair_dropout import TileDropout
from seqcomp.runtime.attention.score_tile import Modified

TILE_BYTES = 64 * 2**20


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | Modified | None = None,
    softcap: float = 0.0,
    dropout: TileDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``kernels``. ``softcap`` c > 0: scores become c tanh(score / c) before the mask
    (Gemma 2, 2024). ``dropout``: of the probabilities; the log-sum-exp is without.
    """
    parts = []
    with _full_precision(q.device):
        for rows in _chunks(q, k):
            scores = _scores(q, k, rows, causal=causal, scale=scale, mask=mask, softcap=softcap)[0]
            lse = scores.logsumexp(-1)  # of -inf alone: -inf
            weights = _dropped(_weights(scores, lse), rows, dropout)
            out = weights @ _per_group(v, weights.dtype)
            parts.append((out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


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
    mask: Tensor | Modified | None = None,
    softcap: float = 0.0,
    dropout: TileDropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``kernels``; ``out`` and ``lse`` are those of the whole softmax."""
    dq_parts = []
    dtype = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
    with _full_precision(q.device):
        for rows in _chunks(q, k):
            scores, slope = _scores(
                q, k, rows, causal=causal, scale=scale, mask=mask, softcap=softcap
            )
            weights, dscores = _score_gradient(scores, dout, v, out, lse, rows, dropout)
            dv += (weights.mT @ _grouped(dout, rows, k, dtype)).sum(2)
            dscores = dscores * scale if slope is None else dscores * slope * scale
            dq_parts.append((dscores @ _per_group(k, dtype)).flatten(1, 2))
            dk += (dscores.mT @ _grouped(q, rows, k, dtype)).sum(2)
    return torch.cat(dq_parts, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def mask_gradient(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    mask: Tensor | Modified,
    softcap: float = 0.0,
    dropout: TileDropout | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Cotangent of an additive mask or of modified scores, [B, Hq, Sq, Sk] in accumulator dtype:
    of one small tile. And the scores that are modified.
    """
    rows = slice(0, q.shape[2])
    with _full_precision(q.device):
        scores, _ = _scores(q, k, rows, causal=False, scale=scale, mask=mask, softcap=softcap)
        found = _score_gradient(scores, dout, v, out, lse, rows, dropout)[1].flatten(1, 2)
        if not isinstance(mask, Modified):
            return found, None
        plain, _ = _scores(q, k, rows, causal=False, scale=scale, mask=None, softcap=0.0)
        return found, plain.flatten(1, 2)


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Rows whose scores take about TILE_BYTES."""
    row = max(1, q.shape[0] * q.shape[1] * k.shape[2] * max(q.element_size(), 4))
    step = max(1, TILE_BYTES // row)
    for start in range(0, max(q.shape[2], 1), step):
        yield slice(start, min(start + step, q.shape[2]))


def _scores(
    q: Tensor,
    k: Tensor,
    rows: slice,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | Modified | None,
    softcap: float,
) -> tuple[Tensor, Tensor | None]:
    """[B, Hkv, group, rows, Sk], -inf where a query does not see a key; the slope of what is done
    to q k^T scale, None for 1."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = _grouped(q, rows, k, dtype) @ _per_group(k, dtype).mT * scale
    slope = None
    if softcap:
        ratio = (scores / softcap).tanh()
        scores, slope = ratio * softcap, 1 - ratio.square()
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen[rows], float("-inf"))
    if mask is None:
        return scores, slope
    if isinstance(mask, Modified):
        scores, slope = mask.of(scores.flatten(1, 2), rows)
        groups = (k.shape[1], -1)
        return scores.unflatten(1, groups), slope.unflatten(1, groups)
    mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
    mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (k.shape[1], -1))
    if mask.dtype != torch.bool:
        return scores + mask.to(dtype), slope
    return scores.masked_fill(~mask, float("-inf")), slope


def _score_gradient(
    scores: Tensor,
    dout: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: slice,
    dropout: TileDropout | None,
) -> tuple[Tensor, Tensor]:
    """(weights of the values, cotangent of the scores) of some rows."""
    weights = _weights(scores, lse[:, :, rows].unflatten(1, (v.shape[1], -1)))
    dout_w, out_w = (_grouped(x, rows, v, weights.dtype) for x in (dout, out))
    delta = (dout_w * out_w).sum(-1, keepdim=True)
    products = dout_w @ _per_group(v, weights.dtype).mT
    if dropout is None:
        return weights, weights * (products - delta)
    kept = _dropped(weights, rows, dropout)
    return kept, kept * products - weights * delta


def _dropped(weights: Tensor, rows: slice, dropout: TileDropout | None) -> Tensor:
    """[B, Hkv, group, rows, Sk] as values are weighted by."""
    if dropout is None:
        return weights
    return weights * dropout.factors(rows, weights.dtype).unflatten(1, weights.shape[1:3])


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()


def _grouped(x: Tensor, rows: slice, k: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, Hq, S, d] -> [B, Hkv, group, rows, d]."""
    return x[:, :, rows].unflatten(1, (k.shape[1], -1)).to(dtype)


def _per_group(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).unsqueeze(2)


def _full_precision(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, enabled=False)
