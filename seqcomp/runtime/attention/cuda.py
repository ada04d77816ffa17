"""The fused attentions of GPUs; the interface is that of `kernels`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from seqcomp.runtime.attention.bias import aligned, finite, sees_nothing

aten = torch.ops.aten

Grads = tuple[Tensor, Tensor, Tensor]


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert mask is None, "see choose_masked"
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def flash_backward(
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
) -> Grads:
    assert mask is None, "see choose_masked"
    seed, offset = _no_dropout_state(q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        seed,
        offset,
        scale=scale,
    )


def efficient_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    bias = None if mask is None else aligned(mask, q, k)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, causal, scale=scale
    )
    lse = lse[..., : q.shape[2]]
    if bias is None:
        return out, lse
    nothing = sees_nothing(bias)
    return out.masked_fill(nothing.unsqueeze(-1), 0.0), lse.masked_fill(nothing, float("-inf"))


def efficient_backward(
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
) -> Grads:
    seed, offset = _no_dropout_state(q.device)
    # The kernel reads whole blocks of 32 rows and takes +inf for rows that are not there.
    padded = F.pad(finite(lse), (0, -lse.shape[-1] % 32), value=float("inf"))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout,
        q,
        k,
        v,
        None if mask is None else aligned(mask, q, k),
        out,
        padded.contiguous(),
        seed,
        offset,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return dq, dk, dv


def cudnn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert mask is None, "see choose_masked"
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, (lse.squeeze(-1) if lse.dim() == 4 else lse)


def cudnn_backward(
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
) -> Grads:
    assert mask is None, "see choose_masked"
    seed, offset = _no_dropout_state(q.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.unsqueeze(-1).contiguous(),
        seed,
        offset,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )


def _no_dropout_state(device: torch.device) -> tuple[Tensor, Tensor]:
    state = torch.zeros(2, dtype=torch.int64, device=device)
    return state[0], state[1]
