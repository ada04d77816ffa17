"""Attention kernels behind one interface, with the log-sum-exp that merging needs.

Shapes: q [B,Hq,Sq,d], k [B,Hkv,Sk,d], v [B,Hkv,Sk,dv], out [B,Hq,Sq,dv] in the dtype of q, lse
[B,Hq,Sq] natural logarithm in fp32 (fp64 for fp64). The backward takes the out and lse of the
*whole* softmax, of which the given keys may be a part, and returns what these keys contribute to
dq, dk, dv. ``causal`` is only used on square tiles, where kernels agree on its meaning. ``mask``,
broadcastable to [B,Hq,Sq,Sk], is boolean (True is seen) or added to the scores; only kernels that
`choose_masked` names take one, or `HiddenRows` in its place; "math" a `ScoreTile` too. A query that
sees nothing gets out = 0 and lse = -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqcomp.runtime.attention import hidden_rows, math_kernel
from seqcomp.runtime.attention.hidden_rows import HiddenRows
from seqcomp.runtime.attention.merge import accumulator_dtype
from seqcomp.runtime.attention.tile_mask import TileMask

aten = torch.ops.aten

Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Kernel:
    """``grouped``: takes fewer KV heads than query heads and returns dk, dv for the KV heads.
    ``whole``: causal squares of up to so many rows are computed whole, masks taken; 0: none are."""

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Grads]
    grouped: bool
    whole: int = 0


def kernel(name: str, *, group: int = 1, softcap: float = 0.0) -> Kernel:
    """The kernel of that name; for ``group`` = Hq / Hkv > 1 wrapped where it needs equal heads.

    ``softcap`` > 0 only with "math": no fused kernel has it.
    """
    found = _KERNELS[name]
    if softcap:
        assert name == "math", f"{name} has no softcap"
        found = Kernel(
            name,
            partial(math_kernel.forward, softcap=softcap),
            partial(math_kernel.backward, softcap=softcap),
            grouped=True,
        )
    found = found if group == 1 or found.grouped else _expanding(found, group)
    return _lifting(found, softcap)


def choose(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str:
    """The fastest kernel that takes these tensors."""
    if head_dim != value_dim:
        return "math"
    if device.type == "cpu" and dtype in _CPU_DTYPES:
        return "cpu_flash"
    if device.type == "cuda" and dtype != torch.float64 and head_dim % 8 == 0:
        half = dtype in (torch.float16, torch.bfloat16)
        return "cuda_flash" if half and _flash_fits(device, head_dim) else "cuda_efficient"
    return "math"


def choose_masked(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str:
    """The fastest kernel that takes these tensors and a mask."""
    name = choose(device, dtype, head_dim, value_dim)
    return "cuda_efficient" if name.startswith("cuda") else name


_CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _flash_fits(device: torch.device, head_dim: int) -> bool:
    return (
        head_dim <= 256
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _cpu_flash_forward(
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
    bias = _bias(mask, q, k)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    # The kernel says 0 for a query that sees nothing.
    if bool((lse == 0).any()):
        lse = lse.masked_fill(_sees_nothing(bias), float("-inf"))
    return out, lse


def _cpu_flash_backward(
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
    bias = None
    if mask is not None:  # without one every query sees something
        bias, lse = _bias(mask, q, k), _finite(lse)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def _bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
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


def _sees_nothing(bias: Tensor) -> Tensor:
    return bias.amax(-1) == float("-inf")


def _finite(lse: Tensor) -> Tensor:
    """exp(score - lse) must be 0 for a query that has seen nothing: its scores are all -inf."""
    return lse.masked_fill(lse == float("-inf"), 0.0).contiguous()


def _cuda_flash_forward(
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


def _cuda_flash_backward(
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


def _cuda_efficient_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    bias = None if mask is None else _aligned_bias(mask, q, k)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, causal, scale=scale
    )
    lse = lse[..., : q.shape[2]]
    if bias is None:
        return out, lse
    nothing = _sees_nothing(bias)
    return out.masked_fill(nothing.unsqueeze(-1), 0.0), lse.masked_fill(nothing, float("-inf"))


def _aligned_bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """An additive mask [B, Hq, Sq, Sk] in the dtype of q whose rows start at multiples of 16."""
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    room = q.new_zeros((*shape[:3], -(-shape[3] // 16) * 16))
    bias = room[..., : shape[3]]
    mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    if mask.dtype == torch.bool:
        return bias.masked_fill_(~mask, float("-inf"))
    return bias.copy_(mask)


def _cuda_efficient_backward(
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
    padded = F.pad(_finite(lse), (0, -lse.shape[-1] % 32), value=float("inf"))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout,
        q,
        k,
        v,
        None if mask is None else _aligned_bias(mask, q, k),
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


def _cuda_cudnn_forward(
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


def _cuda_cudnn_backward(
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


def _lifting(inner: Kernel, softcap: float) -> Kernel:
    """Takes rows of a mask that finite numbers hide, and more columns of out and dout than of v."""

    def forward(*tensors: Tensor, mask: TileMask | None = None, **how: Any) -> Any:
        if isinstance(mask, HiddenRows):
            return hidden_rows.forward(inner.forward, *tensors, mask=mask, **how)
        return inner.forward(*tensors, mask=mask, **how)

    def backward(dout: Tensor, *tensors: Tensor, mask: TileMask | None = None, **how: Any) -> Any:
        extra = dout.shape[-1] - tensors[2].shape[-1]
        if extra:
            wide = [F.pad(x, (0, extra)) for x in tensors[:3]]
            grads = backward(dout, *wide, *tensors[3:], mask=mask, **how)
            return tuple(grad[..., :-extra].contiguous() for grad in grads)
        tensors = (dout, *tensors)
        if isinstance(mask, HiddenRows):
            how["softcap"] = softcap
            return hidden_rows.backward(inner.backward, *tensors, mask=mask, **how)
        return inner.backward(*tensors, mask=mask, **how)

    return replace(inner, forward=forward, backward=backward)


def _expanding(inner: Kernel, group: int) -> Kernel:
    """Repeat KV heads for a kernel without groups, and sum their gradients over each group."""

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        k, v = _repeat(k, group), _repeat(v, group)
        return inner.forward(q, k, v, causal=causal, scale=scale, mask=mask)

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
    ) -> Grads:
        k, v = _repeat(k, group), _repeat(v, group)
        dq, dk, dv = inner.backward(dout, q, k, v, out, lse, causal=causal, scale=scale, mask=mask)
        return dq, _sum_groups(dk, group), _sum_groups(dv, group)

    return replace(inner, forward=forward, backward=backward, grouped=True)


def _repeat(x: Tensor, group: int) -> Tensor:
    return x.repeat_interleave(group, dim=1)


def _sum_groups(x: Tensor, group: int) -> Tensor:
    return x.unflatten(1, (-1, group)).sum(2, dtype=x.dtype)


_KERNELS = {
    "math": Kernel("math", math_kernel.forward, math_kernel.backward, grouped=True),
    "cpu_flash": Kernel(
        "cpu_flash", _cpu_flash_forward, _cpu_flash_backward, grouped=True, whole=512
    ),
    "cuda_flash": Kernel("cuda_flash", _cuda_flash_forward, _cuda_flash_backward, grouped=True),
    "cuda_efficient": Kernel(
        "cuda_efficient", _cuda_efficient_forward, _cuda_efficient_backward, grouped=False
    ),
    "cuda_cudnn": Kernel("cuda_cudnn", _cuda_cudnn_forward, _cuda_cudnn_backward, grouped=False),
}
