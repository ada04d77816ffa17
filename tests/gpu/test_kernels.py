"""CUDA kernels against the math kernel: outputs, log-sum-exp and gradients."""

from __future__ import annotations

import pytest
import torch

from seqcomp.runtime.attention import kernels

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.06, torch.float32: 0.005}


def tensors(dtype: torch.dtype, kv_heads: int, head_dim: int, rows: int = 200):
    rng = torch.Generator().manual_seed(0)
    return [
        # [B, S, H, d] in memory, as models have it.
        torch.randn(2, rows, h, head_dim, generator=rng).to(DEVICE, dtype).transpose(1, 2)
        for h in (8, kv_heads, kv_heads, 8)
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["cuda_flash", "cuda_efficient", "cuda_cudnn"])
def test_kernel_agrees_with_math(name, dtype, head_dim, kv_heads, causal):
    if dtype == torch.float32 and name != "cuda_efficient":
        pytest.skip("half precision only")
    q, k, v, dout = tensors(dtype, kv_heads, head_dim)
    scale = head_dim**-0.5
    ours, math = (kernels.kernel(n, group=8 // kv_heads) for n in (name, "math"))
    out, lse = ours.forward(q, k, v, causal=causal, scale=scale)
    out_ref, lse_ref = math.forward(q, k, v, causal=causal, scale=scale)
    assert lse.shape == q.shape[:3]
    assert lse.dtype == torch.float32
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, out_ref, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, lse_ref, rtol=1e-3, atol=2e-3)
    got = ours.backward(dout, q, k, v, out, lse, causal=causal, scale=scale)
    wanted = math.backward(dout, q, k, v, out_ref, lse_ref, causal=causal, scale=scale)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["cuda_flash", "cuda_efficient", "cuda_cudnn"])
def test_backward_of_a_part_uses_the_whole_softmax(name):
    q, k, v, dout = tensors(torch.bfloat16, 8, 64, rows=256)
    ours, math = kernels.kernel(name), kernels.kernel("math")
    out, lse = math.forward(q, k, v, causal=False, scale=0.125)
    keys = (k[:, :, 64:192], v[:, :, 64:192])
    got = ours.backward(dout, q, *keys, out, lse, causal=False, scale=0.125)
    wanted = math.backward(dout, q, *keys, out, lse, causal=False, scale=0.125)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0.06, atol=0.06)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "expected"),
    [
        (torch.bfloat16, 64, "cuda_flash"),
        (torch.float32, 64, "cuda_efficient"),
        (torch.float64, 64, "math"),
        (torch.bfloat16, 63, "math"),
    ],
)
def test_choice(dtype, head_dim, expected):
    assert kernels.choose(torch.device(DEVICE), dtype, head_dim, head_dim) == expected
