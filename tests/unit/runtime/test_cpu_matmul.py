"""The kernel of batched products against the plain one: masks, groups, head dims, accumulation."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from seqcomp.runtime.attention import cpu_matmul, kernels
from seqcomp.runtime.attention.band_mask import BandMask, bias_of

CPU = torch.device("cpu")
ROWS, KEYS = 70, 150


def band(down: int, up: int, rows: int = ROWS, keys: int = KEYS) -> BandMask:
    return BandMask(down, up, rows, keys, partial(bias_of, CPU))


def seen(heads: int, samples: int = 1) -> Tensor:
    rng = torch.Generator().manual_seed(heads)
    found = torch.rand(samples, heads, ROWS, KEYS, generator=rng) > 0.4
    found[:, :, 3] = False  # a query that sees nothing
    return found


def added(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).double()


MASKS: dict[str, Any] = {
    "none": None,
    "window": band(-8, 40),
    "window at the end": band(60, 75),
    "rows that see nothing": band(100, 110),
    "nothing is hidden": band(-200, 200),
    "nothing is seen": band(300, 310),
    "boolean": seen(1),
    "boolean of each head": seen(4),
    "boolean of each sample": seen(1, 2),
    "boolean of two dims": seen(1)[0, 0],
    "added": added((1, 4, ROWS, KEYS)),
    "added to rows": added((2, 1, ROWS, 1)),
    "added to keys": added((KEYS,)),
}


def inputs(dtype: torch.dtype, kv_heads: int, value_dim: int, rows: int, keys: int) -> Any:
    rng = torch.Generator().manual_seed(1)
    shapes = ((4, rows, 8), (kv_heads, keys, 8), (kv_heads, keys, value_dim), (4, rows, value_dim))
    # The heads of a token side by side, as they come from projections.
    return [
        torch.randn(2, n, h, d, generator=rng, dtype=torch.float64).to(dtype).transpose(1, 2)
        for h, n, d in shapes
    ]


def close(found: Any, expected: Any, dtype: torch.dtype) -> None:
    limit = 1e-12 if dtype == torch.float64 else 2e-5
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=limit, atol=limit)


@pytest.mark.parametrize("small", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("value_dim", [8, 5])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MASKS)
def test_agrees_with_math(
    name: str, dtype: torch.dtype, kv_heads: int, value_dim: int, small: bool, monkeypatch: Any
) -> None:
    if small:  # a few rows of one head
        monkeypatch.setattr(cpu_matmul, "PIECE_BYTES", 9 * KEYS * 8)
        monkeypatch.setattr(cpu_matmul, "STRIP", 16)
    q, k, v, dout = inputs(dtype, kv_heads, value_dim, ROWS, KEYS)
    ours, math = (kernels.kernel(n, group=4 // kv_heads) for n in ("cpu_matmul", "math"))
    how: dict[str, Any] = {"causal": False, "scale": 0.3}
    out, lse = math.forward(q, k, v, mask=MASKS[name], **how)
    close(ours.forward(q, k, v, mask=MASKS[name], **how), (out, lse), dtype)
    # Of a softmax with more keys than these.
    lse = torch.logaddexp(lse, torch.full_like(lse, 0.5))
    tensors = (dout, q, k, v, out, lse)
    expected = math.backward(*tensors, mask=MASKS[name], **how)
    close(ours.backward(*tensors, mask=MASKS[name], **how), expected, dtype)
    if isinstance(MASKS[name], BandMask):
        into = tuple(torch.ones_like(x) for x in (q, k, v))
        for each in (ours, math):
            each.backward(*tensors, mask=MASKS[name], into=into, **how)
        close(into, [2 * x + 1 for x in expected], dtype)


@pytest.mark.parametrize("value_dim", [8, 5])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_triangles(dtype: torch.dtype, kv_heads: int, value_dim: int) -> None:
    q, k, v, dout = inputs(dtype, kv_heads, value_dim, 200, 200)
    ours, math = (kernels.kernel(n, group=4 // kv_heads) for n in ("cpu_matmul", "math"))
    out, lse = math.forward(q, k, v, causal=True, scale=0.3)
    close(ours.forward(q, k, v, causal=True, scale=0.3), (out, lse), dtype)
    given = (dout, q, k, v, out, lse)
    expected = math.backward(*given, causal=True, scale=0.3)
    close(ours.backward(*given, causal=True, scale=0.3), expected, dtype)


def test_large_scores_and_masks_of_large_numbers() -> None:
    """Neither overflow nor a sum over what a finite number hides."""
    q, k, v, dout = inputs(torch.float32, 4, 8, ROWS, KEYS)
    q = q * 300
    hidden = torch.zeros(ROWS, KEYS).masked_fill(~seen(1)[0, 0], torch.finfo(torch.float32).min)
    hidden[3] = 0
    ours, math = kernels.kernel("cpu_matmul"), kernels.kernel("math")
    expected = math.forward(*(x.double() for x in (q, k, v)), causal=False, scale=1, mask=hidden)
    out, lse = ours.forward(q, k, v, causal=False, scale=1, mask=hidden)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-3)
    grads = ours.backward(dout, q, k, v, out, lse, causal=False, scale=1, mask=hidden)
    assert all(bool(x.isfinite().all()) for x in (out, *grads))


def test_autocast_does_not_reach_its_products() -> None:
    q, k, v, _ = inputs(torch.float32, 4, 5, ROWS, KEYS)
    ours = kernels.kernel("cpu_matmul")
    expected = ours.forward(q, k, v, causal=False, scale=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ours.forward(q, k, v, causal=False, scale=0.3)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_it_is_what_masks_and_other_head_dims_get_on_cpus() -> None:
    for dtype, masked, unequal in (
        (torch.float64, "cpu_matmul", "cpu_matmul"),
        (torch.float32, "cpu_matmul", "cpu_matmul"),
        (torch.bfloat16, "cpu_flash", "math"),
    ):
        assert kernels.choose(CPU, dtype, 8, 8) == "cpu_flash"
        assert kernels.choose_masked(CPU, dtype, 8, 8) == masked
        assert kernels.choose(CPU, dtype, 8, 4) == unequal
        assert kernels.choose_masked(CPU, dtype, 8, 4) == unequal
    assert kernels.choose(torch.device("meta"), torch.float32, 8, 8) == "math"
