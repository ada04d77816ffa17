"""What tiles give is added up as it comes; what a kernel computes is little more than is seen."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from seqcomp.layout.masks import Band, Causal
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.attention import AttentionPlan, attention
from seqcomp.runtime.attention.sums import TokenSum
from seqcomp.runtime.attention.untouched import Untouched

intervals = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6)


@given(intervals)
def test_each_token_is_first_once(given_parts: list[tuple[int, int]]) -> None:
    untouched, left = Untouched(12), set(range(12))
    total, expected = TokenSum(torch.empty(1, 1, 12, 1)), torch.zeros(12)
    for start, stop in given_parts:
        first = untouched.take(start, stop)
        assert {i for r in first for i in r} == left & set(range(start, stop))
        left -= set(range(start, stop))
        if start < stop:
            total.add(start, stop, torch.ones(1, 1, stop - start, 1))
            expected[start:stop] += 1
    assert {i for r in untouched.ranges for i in r} == left
    assert torch.equal(total.result().flatten(), expected)


class Watched(TorchDispatchMode):
    """Pairs that the kernels of CPUs compute, and how many of flash's gradients live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs, self.alive, self.calls = 0, 0, 0
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::baddbmm":  # the scores of cpu_matmul, in both phases
            self.pairs += out.numel()
        if name == "aten::_scaled_dot_product_flash_attention_for_cpu":
            rows, keys, causal = args[0].shape[2], args[1].shape[2], args[4:5] == (True,)
            # It skips keys that a block of queries does not see in blocks of 512.
            block = 256 if rows >= 768 else 64 if rows >= 192 else 32
            for last in range(block, rows + block, block):
                seen = min(keys, -(-min(last, rows) // 512) * 512) if causal else keys
                self.pairs += (min(last, rows) - last + block) * seen
        if name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
            self.calls += 1
            self._made += [StorageWeakRef(x.untyped_storage()) for x in out]
            self.alive = max(self.alive, sum(not ref.expired() for ref in self._made))
        return out


def watched(
    mask: Band | Causal, length: int, *, backward: bool, dtype: torch.dtype = torch.float32
) -> tuple[Watched, float]:
    """And the pairs computed for each that is seen, in one phase."""
    inputs = [torch.randn(1, 1, length, 8, requires_grad=True, dtype=dtype) for _ in range(3)]
    found = Watched()
    plan = AttentionPlan(mask, SequenceLayout("contiguous", 1))
    with contextlib.nullcontext() if backward else found:
        out = attention(*inputs, plan)
    if backward:
        with found:
            out.sum().backward()
    i = torch.arange(length)
    return found, found.pairs / int(mask.visible(i[:, None], i[None]).sum())


def test_a_triangle_costs_what_is_seen() -> None:
    assert 1 < watched(Causal(), 2048, backward=False)[1] <= 1.2
    found = watched(Causal(), 2048, backward=True)[0]
    assert found.calls > 15
    assert found.alive <= 9  # of three tiles


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("window", "most"), [(256, 1.3), (512, 1.16), (1024, 1.08)])
def test_a_narrow_window_costs_what_is_seen(window: int, most: float, backward: bool) -> None:
    found, ratio = watched(Band(0, window - 1), 3072, backward=backward)
    assert found.calls == 0, "no part of it is left to flash"
    assert 1 < ratio <= most


def test_a_window_costs_what_is_seen() -> None:
    assert 1 < watched(Band(0, 1535), 4096, backward=False)[1] <= 1.2


def test_half_precision_runs_in_strips() -> None:
    """Of 192 queries in forward, and of as many keys in backward."""
    mask = Band(0, 1535)
    assert watched(mask, 4096, backward=False, dtype=torch.bfloat16)[1] <= 1.15
    assert watched(mask, 4096, backward=True, dtype=torch.bfloat16)[0].calls == -(-4096 // 192)
