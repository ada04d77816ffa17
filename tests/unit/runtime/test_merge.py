"""The online-softmax merge, with rows that have seen nothing on either side."""

from __future__ import annotations

import pytest
import torch

from seqcomp.runtime.attention import kernels, math_kernel
from seqcomp.runtime.attention.merge import SoftmaxAccumulator, merge_

NOTHING = float("-inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merging_parts_gives_the_whole_softmax_for_any_split(dtype):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 16, 4, generator=rng, dtype=dtype) for _ in range(3))
    whole, whole_lse = math_kernel.forward(q, k, v, causal=False, scale=1.0)
    softmax = SoftmaxAccumulator(16)
    for start, stop in ((3, 9), (0, 3), (9, 16)):
        part = math_kernel.forward(
            q, k[:, :, start:stop], v[:, :, start:stop], causal=False, scale=1.0
        )
        softmax.add(0, 16, *part)
    out, lse = softmax.result(q)
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-13}[dtype]
    torch.testing.assert_close(out, whole, rtol=0, atol=tolerance * 5)
    torch.testing.assert_close(lse, whole_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ours", [NOTHING, 1.0, 500.0])
@pytest.mark.parametrize("theirs", [NOTHING, 1.0, -700.0])
def test_nothing_and_extremes_merge_without_nan(ours, theirs):
    out = torch.full((1, 2), 0.0 if ours == NOTHING else 3.0)
    part = torch.full((1, 2), 0.0 if theirs == NOTHING else 7.0)
    lse, part_lse = torch.tensor([ours]), torch.tensor([theirs])
    merge_(out, lse, part, part_lse)
    scores = torch.tensor([ours, theirs])
    expected = 0.0
    if scores.max() > NOTHING:
        expected = (scores.softmax(0) * torch.tensor([3.0, 7.0])).sum().item()
    assert out.tolist() == [[pytest.approx(expected)] * 2]
    assert torch.equal(lse, scores.logsumexp(0, keepdim=True))


@pytest.mark.parametrize("broken", ["ours", "theirs"])
def test_nan_stays(broken):
    nan = float("nan")
    out, lse = torch.zeros(1, 2), torch.zeros(1)
    part, part_lse = torch.zeros(1, 2), torch.zeros(1)
    for x in (out, lse) if broken == "ours" else (part, part_lse):
        x.fill_(nan)
    merge_(out, lse, part, part_lse)
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())


def test_rows_without_any_part_stay_zero():
    softmax = SoftmaxAccumulator(4)
    softmax.add(1, 3, torch.ones(1, 2, 5), torch.zeros(1, 2))
    out, lse = softmax.result(torch.empty(1, 4, 5))
    assert out.sum(-1).tolist() == [[0.0, 5.0, 5.0, 0.0]]
    assert lse.tolist() == [[NOTHING, 0.0, 0.0, NOTHING]]


def test_half_precision_parts_are_accumulated_in_fp32():
    softmax = SoftmaxAccumulator(2)
    for _ in range(64):
        softmax.add(0, 2, torch.full((1, 2, 1), 1.0078125, dtype=torch.bfloat16), torch.zeros(1, 2))
    out, lse = softmax.result(torch.empty(1, 2, 1))
    assert out.dtype == lse.dtype == torch.float32
    assert out.flatten().tolist() == [1.0078125] * 2
    torch.testing.assert_close(lse, torch.full((1, 2), 64.0).log())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cpu_flash_agrees_with_math(dtype, kv_heads, causal):
    rng = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(2, h, 33, 8, generator=rng).to(dtype) for h in (4, kv_heads, kv_heads, 4)
    )
    assert kernels.choose(q.device, dtype, 8, 8) == "cpu_flash"
    flash, math = (kernels.kernel(name, group=4 // kv_heads) for name in ("cpu_flash", "math"))
    out, lse = flash.forward(q, k, v, causal=causal, scale=0.3)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.06)
    for a, b in zip((out, lse), math.forward(q, k, v, causal=causal, scale=0.3), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    grads = [
        each.backward(dout, q, k, v, out, lse, causal=causal, scale=0.3) for each in (flash, math)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_a_kernel_without_groups_is_given_whole_heads():
    real = kernels.kernel("cpu_flash")

    def forward(q, k, v, **arguments):
        assert q.shape[1] == k.shape[1]
        return real.forward(q, k, v, **arguments)

    def backward(dout, q, k, v, out, lse, **arguments):
        assert q.shape[1] == k.shape[1]
        return real.backward(dout, q, k, v, out, lse, **arguments)

    wrapped = kernels._expanding(kernels.Kernel("strict", forward, backward, grouped=False), 2)
    q, k, v = (torch.randn(2, h, 6, 4, dtype=torch.float64) for h in (4, 2, 2))
    out, lse = wrapped.forward(q, k, v, causal=True, scale=1.0)
    expected = real.forward(q, k, v, causal=True, scale=1.0)
    torch.testing.assert_close((out, lse), expected)
    for a, b in zip(
        wrapped.backward(q, q, k, v, out, lse, causal=True, scale=1.0),
        real.backward(q, q, k, v, out, lse, causal=True, scale=1.0),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
