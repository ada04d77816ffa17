"""Attention written with einsum is read as attention, with the KV heads as they are stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqcomp
from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.recognise import recognise_attention
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.written_out import Form, Written, ids, later
from tests.unit.capture.captured import capture_of, ops_of, run

BATCH, LENGTH, HEADS, KV_HEADS, WIDTH, LAYERS = 2, 16, 4, 2, 8, 2  # of `Written` and its ids


def weights(scores: Tensor, q: Tensor) -> Tensor:
    scores = scores / math.sqrt(WIDTH)
    return scores.masked_fill(later(q), -math.inf).softmax(-1)


def heads_first(m: Written, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    w = weights(torch.einsum("bhqd,bhkd->bhqk", q, k), q)
    return torch.einsum("bhqk,bhkd->bhqd", w, v)


def sequence_first(m: Written, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    own, (k, v) = q, (x.transpose(1, 2).repeat_interleave(2, dim=2) for x in (k, v))
    w = weights(torch.einsum("bqhd, bkhd -> bhqk", q.transpose(1, 2), k), own)
    return torch.einsum("bhqk, bkhd -> bqhd", w, v).transpose(1, 2)


def values_first(m: Written, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Operands the other way round, KV heads expanded, leading dims unnamed in one product."""
    b, s = k.shape[0], k.shape[2]
    k, v = (
        x.transpose(1, 2)[:, :, :, None].expand(b, s, KV_HEADS, 2, WIDTH).reshape(b, s, HEADS, -1)
        for x in (k, v)
    )
    w = weights(torch.einsum("...kd,...qd->...qk", k.transpose(1, 2), q), q)
    return torch.einsum("bkhd,bhqk->bqhd", v, w).transpose(1, 2)


def keys_turned_at_once(m: Written, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, S, H, d] -> [B, H, d, S] in one permutation, and no einsum."""
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    return weights(q @ k.transpose(1, 2).permute(0, 2, 3, 1), q) @ v


FORMS = (heads_first, sequence_first, values_first)
TOKENS, BYTES = BATCH * LENGTH, 8
RING, ULYSSES = plans.ring(2, "zigzag"), plans.ulysses(2)
# Of a rank in all layers, forward: DESIGN's formulas for P = 2.
SENT = {
    "p2p": LAYERS * TOKENS * KV_HEADS * WIDTH * BYTES,
    "all_to_all": LAYERS * TOKENS * (2 * HEADS + 2 * KV_HEADS) * WIDTH * BYTES // 4,
}


class Einsum(Written):
    def __init__(self, form: Form) -> None:
        super().__init__("llama")
        self.form = form


def sent(form: Form, plan: plans.Plan, kind: str) -> int:
    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> int:
        context.traffic.reset()
        model(**local)
        return sum(row.bytes_sent for row in context.traffic.rows() if row.kind == kind)

    return lockstep(lambda: Einsum(form), plan, step, inputs=ids())[0]


@pytest.mark.parametrize(
    ("plan", "kind"), [(RING, "p2p"), (ULYSSES, "all_to_all")], ids=["ring", "ulysses"]
)
@pytest.mark.parametrize("form", FORMS)
def test_exact_and_divided(form: Form, plan: plans.Plan, kind: str) -> None:
    report = seqcomp.verify(lambda: Einsum(form), plan, inputs_fn=ids)
    assert report.ok, str(report)
    assert not report.findings, "nothing is gathered, repeated or left without a strategy"
    assert sent(form, plan, kind) == SENT[kind]


def test_keys_that_no_transposition_made() -> None:
    report = seqcomp.verify(lambda: Einsum(keys_turned_at_once), RING, inputs_fn=ids)
    assert report.ok, str(report)
    assert not report.findings


class Made(nn.Module):
    """One einsum of what is drawn for its operands."""

    def __init__(self, equation: str, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.equation = equation
        for i, shape in enumerate(shapes):
            self.register_buffer(f"x{i}", torch.randn(shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, *self.buffers()) * x


ONE, TWO = (2, 3, 5, 7), (2, 3, 4, 7)


@pytest.mark.parametrize(
    ("equation", "shapes", "is_product"),
    [
        ("bhqd,bhkd->bhqk", (ONE, TWO), True),
        ("bhqd,bhkd->bhkq", (ONE, TWO), True),
        ("bhqd,bhkd->hkbq", (ONE, TWO), True),
        ("b h q d, b h k d -> b q h k", (ONE, TWO), True),
        ("...qd,...kd->...qk", (ONE, TWO), True),
        ("b...d,bhkd->b...k", ((2, 3, 7), TWO), False),  # h is no letter of both
        ("bhqd,bhkd->bhqk", (ONE, (2, 1, 4, 7)), False),  # one head for all
        ("bhqd,bhkd->bqk", (ONE, TWO), False),
        ("bhqd,bhkd", (ONE, TWO), False),
        ("bhqd,bhqd->bhqd", (ONE, ONE), False),
        ("bhqq,bhkq->bhqk", ((2, 3, 7, 7), TWO), False),
        ("bhqd,bhkd,kh->bhqk", (ONE, TWO, (4, 3)), False),
        ("bqd,bkd->bqk", ((2, 5, 7), (2, 4, 7)), False),
    ],
)
def test_products_of_heads_and_no_others(
    equation: str, shapes: Sequence[Sequence[int]], is_product: bool
) -> None:
    module = Made(equation, shapes)
    x = torch.randn(2, 16, 1, 1, 1, 1, dtype=torch.float64)
    capture = canonicalise(capture_of(module, x))
    torch.testing.assert_close(run(capture, module, x), module(x))
    assert ("aten.matmul" in ops_of(capture)) == is_product
    assert ("aten.einsum" in ops_of(capture)) != is_product


def interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=2).transpose(1, 2)


def expanded(x: Tensor) -> Tensor:
    wide = x.unsqueeze(3).expand(-1, -1, -1, 2, -1)
    return wide.reshape(x.shape[0], -1, HEADS, WIDTH).permute(0, 2, 1, 3)


def tiled(x: Tensor) -> Tensor:
    """Another order of heads: no grouped queries."""
    wide = x.unsqueeze(2).expand(-1, -1, 2, -1, -1)
    return wide.reshape(x.shape[0], -1, HEADS, WIDTH).transpose(1, 2)


class Grouped(nn.Module):
    def __init__(self, repeat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.repeat = repeat

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        k, v = (self.repeat(y(x).unflatten(-1, (KV_HEADS, WIDTH))) for y in (self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("repeat", "kv_heads"), [(interleaved, KV_HEADS), (expanded, KV_HEADS), (tiled, HEADS)]
)
def test_heads_repeated_before_they_are_moved(
    repeat: Callable[[Tensor], Tensor], kv_heads: int
) -> None:
    module = Grouped(repeat).double()
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    capture = canonicalise(capture_of(module, x))
    (found,) = recognise_attention(capture, module)
    assert found.kv_heads == kv_heads
    torch.testing.assert_close(run(capture, module, x), module(x))
