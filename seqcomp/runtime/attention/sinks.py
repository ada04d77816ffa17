"""Attention sinks: one learned logit per head that takes part in the softmax and has no value.

With p_sink = exp(sink - lse'), lse' = log(exp(lse) + exp(sink)): the output shrinks by
1 - p_sink, and d sink = -sum p_sink * (dout . out) (Xiao et al., 2023; gpt-oss, 2025).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqcomp.runtime.attention.heads import of_heads


def apply(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, H, s, d], lse [B, H, s] of the whole softmax, sinks [H] of these heads -> both with
    the sink."""
    logits = sinks.to(lse.dtype).view(1, -1, 1)
    # A query that sees nothing has lse -inf: all its weight is the sink's, and its output 0.
    return out * (lse - logits).sigmoid().unsqueeze(-1).to(out.dtype), torch.logaddexp(lse, logits)


def gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, heads: Sequence[int]) -> Tensor:
    """d sinks of these rows, whose heads are `heads`; `out` and `lse` are those with the sink.

    A head may stand in several slots: dout is 0 in all but one.
    """
    share = (of_heads(sinks, heads, 0).to(lse.dtype).view(1, -1, 1) - lse).exp()
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    own = -(share * delta).sum((0, 2)).to(sinks.dtype)
    index = torch.tensor(heads, device=sinks.device)
    return torch.zeros_like(sinks).index_add_(0, index, own)
