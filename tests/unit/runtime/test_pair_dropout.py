"""Dropout of attention: tiles are parts of one mask, and memory is that of tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqcomp.capture.recognise import attention as written_out
from seqcomp.layout.masks import Band, Causal, Full, Mask
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.attention import AttentionPlan, attention, math_kernel
from seqcomp.runtime.attention.pair_dropout import PairDropout
from seqcomp.runtime.random import keys_of

P = 0.3
KEYS = keys_of(9, 2, torch.device("cpu"))
ALONE = SequenceLayout("contiguous")


def operands(length: int, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, n, length, 8) for n in (heads, kv_heads, kv_heads)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.requires_grad_() for x in made]


def dense_mask(rule: Mask, length: int) -> Tensor:
    q, k = torch.arange(length)[:, None], torch.arange(length)
    return {Full(): q >= -k, Causal(0): k <= q}.get(rule, (k <= q) & (k > q - 3))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("rule", [Full(), Causal(0), Band(0, 2)], ids=str)
def test_it_is_attention_with_dropped_weights(
    rule: Mask, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_kernel, "TILE_BYTES", 2000)  # a few rows at a time
    sinks = torch.randn(4, dtype=torch.float64).requires_grad_() if with_sinks else None
    q, k, v = operands(16)
    given = [q, k, v, *([] if sinks is None else [sinks])]
    dropout = PairDropout.whole(KEYS[1], P, (2, 4, 16, 16))
    got = attention(q, k, v, AttentionPlan(rule, ALONE), sinks=sinks, dropout=dropout)
    want = written_out(
        q, k, v, dense_mask(rule, 16), False, 8**-0.5, sinks=sinks, dropout=KEYS, number=1, p=P
    )
    plain = attention(q, k, v, AttentionPlan(rule, ALONE), sinks=sinks)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    assert not torch.allclose(got, plain, atol=1e-2)
    cotangent = torch.randn(got.shape, dtype=got.dtype)
    for a, b in zip(
        torch.autograd.grad(got, given, cotangent),
        torch.autograd.grad(want, given, cotangent),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.size = max(self.size, *sizes) if sizes else self.size
        return out


def test_no_matrix_of_all_pairs_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    length, rows = 256, 16
    monkeypatch.setattr(math_kernel, "TILE_BYTES", 2 * 4 * length * 8 * rows)
    q, k, v = operands(length)
    dropout = PairDropout.whole(KEYS[0], P, (2, 4, length, length))
    with Largest() as seen:
        attention(q, k, v, AttentionPlan(Full(), ALONE), dropout=dropout).sum().backward()
    assert 0 < seen.size <= 2 * 4 * length * rows < 2 * 4 * length * length / 8
