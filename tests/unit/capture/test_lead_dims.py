"""Attention over other dims than [batch, heads]: read as attention, with KV heads as stored."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqcomp
from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.recognise import recognise_attention
from seqcomp.layout.masks import Causal
from tests.fixtures import plans
from tests.unit.capture.captured import capture_of, ops_of, run

HEADS, WIDTH, D, S = 4, 3, 12, 8

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def later(n: int) -> Tensor:
    at = torch.arange(n)
    return at > at[:, None]


def probabilities(scores: Tensor) -> Tensor:
    hidden = later(scores.shape[-1])
    return (scores / math.sqrt(WIDTH)).masked_fill(hidden, -math.inf).softmax(-1)


def one_key_for_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Multi-query by einsum: keys and values have no letter for heads."""
    q = q.unflatten(-1, (HEADS, WIDTH))
    w = probabilities(torch.einsum("bqhd,bkd->bhqk", q, k[..., :WIDTH]))
    return torch.einsum("bhqk,bkd->bqhd", w, v[..., :WIDTH]).flatten(2)


def one_key_broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    w = probabilities(q @ k[:, None, :, :WIDTH].mT)
    return (w @ v[:, None, :, :WIDTH]).transpose(1, 2).flatten(2)


def split(q: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
    """q [B, S, KV heads, queries of each, d], keys and values [B, S, KV heads, d]."""
    kv = (x[..., : 2 * WIDTH].unflatten(-1, (2, WIDTH)) for x in keys)
    return q.unflatten(-1, (2, 2, WIDTH)), *kv


def groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = split(q, k, v)
    scores = torch.einsum("bqhgd,bkhd->bhgqk", q, k) / math.sqrt(WIDTH)
    w = torch.where(~later(S)[None, None, None], scores, -math.inf).softmax(-1)
    return torch.einsum("bhgqk,bkhd->bqhgd", w, v).flatten(2)


def groups_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = split(q, k, v)
    k, v = (x.transpose(1, 2)[:, :, None] for x in (k, v))
    out = F.scaled_dot_product_attention(q.permute(0, 2, 3, 1, 4), k, v, is_causal=True)
    return out.permute(0, 3, 1, 2, 4).flatten(2)


def flat(x: Tensor) -> Tensor:
    """[B, S, heads * d] -> [B * heads, S, d]"""
    return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2).flatten(0, 1)


def joined(x: Tensor) -> Tensor:
    return x.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)


def flat_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = flat(q), flat(k), flat(v)
    return joined(
        torch.einsum("bij,bjd->bid", probabilities(torch.einsum("bid,bjd->bij", q, k)), v)
    )


def flat_heads_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return joined(F.scaled_dot_product_attention(flat(q), flat(k), flat(v), is_causal=True))


def heads_outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[heads * B, S, d], as the first Transformers had it."""
    q, k, v = (torch.cat(x.split(WIDTH, -1)) for x in (q, k, v))
    return torch.cat(torch.bmm(probabilities(torch.bmm(q, k.mT)), v).chunk(HEADS), -1)


KV_HEADS: dict[Form, int] = {
    one_key_for_all: 1, one_key_broadcast: 1, groups: 2, groups_fused: 2, flat_heads: 4,
    flat_heads_fused: 4, heads_outside: 4,
}  # fmt: skip


class Attends(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.form(self.q(x), self.k(x), self.v(x)))


def tokens(batch: int = 2) -> Tensor:
    made = torch.Generator().manual_seed(3)
    return torch.randn(batch, S, D, generator=made, dtype=torch.float64)


@pytest.mark.parametrize("form", KV_HEADS)
def test_is_one_attention_of_the_same_value(form: Form) -> None:
    module = Attends(form).double()
    capture = canonicalise(capture_of(module, tokens()))
    (found,) = recognise_attention(capture, module)
    assert (found.heads, found.kv_heads, found.mask) == (HEADS, KV_HEADS[form], Causal(0))
    gone = {"aten.softmax", "aten.matmul", "aten.bmm", "aten.einsum"}
    assert not gone & set(ops_of(capture))
    torch.testing.assert_close(run(capture, module, tokens(3)), module(tokens(3)))


def groups_of_others(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries of one head are not neighbours: another order than that of grouped queries."""
    q, k, v = split(q, k, v)
    w = probabilities(torch.einsum("bqghd,bkhd->bghqk", q, k))
    return torch.einsum("bghqk,bkhd->bqghd", w, v).flatten(2)


def channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores of features, not of tokens, and one head: [B, d, d]."""
    return ((q.mT @ k / S).softmax(-1) @ v.mT).mT


@pytest.mark.parametrize("form", [groups_of_others, channels])
def test_what_is_not_that_stays_as_it_is(form: Form) -> None:
    module = Attends(form).double()
    capture = canonicalise(capture_of(module, tokens()))
    assert recognise_attention(capture, module) == ()
    torch.testing.assert_close(run(capture, module, tokens(3)), module(tokens(3)))


class Torchs(nn.Module):
    """nn.MultiheadAttention as most call it: with weights that nobody looks at."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, D)
        self.attention = nn.MultiheadAttention(D, HEADS, batch_first=True, dropout=dropout)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = later(ids.shape[1])
        y, _ = self.attention(x, x, x, attn_mask=mask, key_padding_mask=padding)
        return x + y


@pytest.mark.parametrize(
    ("plan", "dropout"), [(plans.ring(2), 0.0), (plans.ulysses(2), 0.4)], ids=["ring", "ulysses"]
)
def test_multihead_attention_with_weights_that_are_dropped(
    plan: plans.Plan, dropout: float
) -> None:
    padding = torch.zeros(2, S, dtype=torch.bool)
    padding[0, 5:] = True
    given = {"ids": torch.arange(2 * S).view(2, S) % 11, "padding": padding}
    report = seqcomp.verify(lambda: Torchs(dropout).double(), plan, inputs_fn=lambda: given)
    assert report.ok, str(report)
    codes = ("SC401", "SC402", "SC407")  # neither gathered nor repeated, and no S x S mask is held
    assert not [f for f in report.findings if any(code in f for code in codes)]


class Padded(nn.Module):
    """Groups of queries under a mask made of data, which it fills in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.k = nn.Embedding(11, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = split(self.q(x), self.k(x), x)
        scores = torch.einsum("bqhgd,bkhd->bhgqk", q, k)
        hidden = later(ids.shape[1]) | (ids == 0)[:, None, None, None]
        w = scores.masked_fill(hidden, -1e30).softmax(-1)
        return x + torch.einsum("bhgqk,bkhd->bqhgd", w, v).flatten(2)


def test_groups_of_queries_under_a_mask_of_data() -> None:
    ids = torch.arange(2 * S).view(2, S) % 7  # the first token of all is hidden: its row is whole
    plan = plans.ring(2, "zigzag")
    report = seqcomp.verify(lambda: Padded().double(), plan, inputs_fn=lambda: {"ids": ids})
    assert report.ok, str(report)
    assert not report.findings
