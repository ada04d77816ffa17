"""Attention kernels behind one interface, with the log-sum-exp that merging needs.

Shapes: q [B,Hq,Sq,d], k [B,Hkv,Sk,d], v [B,Hkv,Sk,dv], out [B,Hq,Sq,dv] in the dtype of q, lse
[B,Hq,Sq] natural logarithm in fp32 (fp64 for fp64). The backward takes the out and lse of the
*whole* softmax, of which the given keys may be a part, and returns what these keys contribute to
dq, dk, dv. ``causal`` is only used on square tiles, where kernels agree on its meaning. ``mask``,
broadcastable to [B,Hq,Sq,Sk], is boolean (True is seen) or added to the scores; only kernels that
`choose_masked` names take one, or `HiddenRows` or a `BandMask` in its place; "math" a `ScoreTile`
too. Where there is a `BandMask` a backward may be given ``into``: totals in accumulator dtype, to
which it adds its gradients. A query that sees nothing gets out = 0 and lse = -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqcomp.runtime.attention import cpu_flash, cpu_matmul, cuda, hidden_rows, math_kernel, strips
from seqcomp.runtime.attention.band_mask import BandMask
from seqcomp.runtime.attention.hidden_rows import HiddenRows
from seqcomp.runtime.attention.merge import accumulator_dtype
from seqcomp.runtime.attention.tile_mask import TileMask

Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Kernel:
    """``grouped``: takes fewer KV heads than query heads and returns dk, dv for the KV heads.
    ``whole``: causal squares of up to so many rows are computed whole, masks taken; 0: none are.
    ``bands``: takes a `BandMask`, and adds to ``into``; others compute its tile in strips of
    ``strip`` rows, 0 for all of them."""

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Grads]
    grouped: bool
    whole: int = 0
    bands: bool = False
    strip: int = 0


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
            strip=found.strip,
        )
    found = found if group == 1 or found.grouped else _expanding(found, group)
    return _lifting(found, softcap)


def choose(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str:
    """The fastest kernel that takes these tensors."""
    if device.type == "cpu" and head_dim == value_dim and dtype in _CPU_DTYPES:
        return "cpu_flash"
    if head_dim != value_dim:
        return "cpu_matmul" if _multiplies(device, dtype) else "math"
    if device.type == "cuda" and dtype != torch.float64 and head_dim % 8 == 0:
        half = dtype in (torch.float16, torch.bfloat16)
        return "cuda_flash" if half and _flash_fits(device, head_dim) else "cuda_efficient"
    return "math"


def choose_masked(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str:
    """The fastest kernel that takes these tensors and a mask."""
    if _multiplies(device, dtype):
        return "cpu_matmul"
    name = choose(device, dtype, head_dim, value_dim)
    return "cuda_efficient" if name.startswith("cuda") else name


_CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether "cpu_matmul" is a kernel for these: it computes in their own dtype."""
    return device.type == "cpu" and dtype in (torch.float32, torch.float64)


def _flash_fits(device: torch.device, head_dim: int) -> bool:
    return (
        head_dim <= 256
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _lifting(inner: Kernel, softcap: float) -> Kernel:
    """Takes rows of a mask that finite numbers hide, and more columns of out and dout than of v."""

    def forward(*tensors: Tensor, mask: TileMask | None = None, **how: Any) -> Any:
        if isinstance(mask, HiddenRows):
            return hidden_rows.forward(inner.forward, *tensors, mask=mask, **how)
        if isinstance(mask, BandMask) and not inner.bands:
            return strips.forward(inner.forward, inner.strip, *tensors, mask=mask, **how)
        return inner.forward(*tensors, mask=mask, **how)

    def backward(
        dout: Tensor,
        *tensors: Tensor,
        mask: TileMask | None = None,
        into: Grads | None = None,
        **how: Any,
    ) -> Any:
        extra = dout.shape[-1] - tensors[2].shape[-1]
        assert into is None or (isinstance(mask, BandMask) and not extra)
        if extra:
            wide = [F.pad(x, (0, extra)) for x in tensors[:3]]
            grads = backward(dout, *wide, *tensors[3:], mask=mask, **how)
            return tuple(grad[..., :-extra].contiguous() for grad in grads)
        tensors = (dout, *tensors)
        if isinstance(mask, HiddenRows):
            how["softcap"] = softcap
            return hidden_rows.backward(inner.backward, *tensors, mask=mask, **how)
        if isinstance(mask, BandMask):
            how["into"] = into = into or _zeros(*tensors[1:4])
            if inner.bands:
                return inner.backward(*tensors, mask=mask, **how)
            strips.backward(inner.backward, inner.strip, *tensors, mask=mask, **how)
            return into
        return inner.backward(*tensors, mask=mask, **how)

    return replace(inner, forward=forward, backward=backward)


def _zeros(*like: Tensor) -> Grads:
    dq, dk, dv = (torch.zeros_like(x, dtype=accumulator_dtype(x.dtype)) for x in like)
    return dq, dk, dv


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
    "math": Kernel("math", math_kernel.forward, math_kernel.backward, grouped=True, strip=128),
    "cpu_flash": Kernel(
        "cpu_flash", cpu_flash.forward, cpu_flash.backward, grouped=True, whole=512, strip=192
    ),
    "cpu_matmul": Kernel(
        "cpu_matmul", cpu_matmul.forward, cpu_matmul.backward, grouped=True, bands=True
    ),
    "cuda_flash": Kernel("cuda_flash", cuda.flash_forward, cuda.flash_backward, grouped=True),
    "cuda_efficient": Kernel(
        "cuda_efficient", cuda.efficient_forward, cuda.efficient_backward, grouped=False
    ),
    "cuda_cudnn": Kernel("cuda_cudnn", cuda.cudnn_forward, cuda.cudnn_backward, grouped=False),
}
