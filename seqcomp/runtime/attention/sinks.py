"""Attention sinks: one learned logit per head that takes part in the softmax and has no value.

With p_sink = exp(sink - lse'), lse' = log(exp(lse) + exp(sink)): the output shrinks by
1 - p_sink, and d sink = -sum p_sink * (dout . out) (Xiao et al., 2023; gpt-oss, 2025).
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, H, s, d], lse [B, H, s] of the whole softmax, sinks [H] -> both with the sink."""
    logits = sinks.to(lse.dtype).view(1, -1, 1)
    # A query that sees nothing has lse -inf: all its weight is the sink's, and its output 0.
    return out * (lse - logits).sigmoid().unsqueeze(-1).to(out.dtype), torch.logaddexp(lse, logits)


def gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """d sinks [H] of these rows; `out` and `lse` are those with the sink."""
    share = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp()
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(share * delta).sum((0, 2)).to(sinks.dtype)
