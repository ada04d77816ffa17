"""The flash attention of CPUs; the interface is that of `kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from seqcomp.runtime.attention.bias import additive, finite, sees_nothing

aten = torch.ops.aten


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if mask is None:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    bias = additive(mask, q, k)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    # The kernel says 0 for a query that sees nothing.
    if bool((lse == 0).any()):
        lse = lse.masked_fill(sees_nothing(bias), float("-inf"))
    return out, lse


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
    bias = None
    if mask is not None:  # without one every query sees something
        bias, lse = additive(mask, q, k), finite(lse)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
