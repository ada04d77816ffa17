"""Case 7: heads that the degree does not divide. Exact with copies or zeros, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqcomp
from seqcomp.layout import heads
from seqcomp.runtime import tensor_parallel
from seqcomp.runtime.attention import function
from seqcomp.runtime.comm import Communicator, RankContext
from seqcomp.runtime.threads import run_ranks
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import (
    CLEARLY_WRONG,
    reference,
)
from tests.fixtures.lockstep import reported, train_once
from tests.fixtures.masked_parity import on_ranks
from tests.fixtures.models import Spec, build, inputs
from tests.fixtures.parity import Case, check_parity
from tests.fixtures.pool import Pools

TWO = Spec(hidden=64, heads=8, kv_heads=2)
ONE = Spec(kv_heads=1)
THREE = Spec(hidden=48, heads=6, kv_heads=3)


@pytest.mark.parametrize(
    ("spec", "plan"),
    [
        pytest.param(TWO, plans.ulysses(4), id="a-2-of-8-ulysses-4"),
        pytest.param(TWO, plans.megatron(4), id="b-2-of-8-tensor-4"),
        pytest.param(ONE, plans.ulysses(2), id="c-1-of-4-ulysses-2"),
        pytest.param(ONE, plans.megatron(4), id="c-1-of-4-tensor-4"),
        pytest.param(TWO, plans.with_tensor(plans.ulysses(2), 4), id="ulysses-2-of-tensor-4"),
        pytest.param(THREE, plans.megatron(3), id="d-3-of-6-tensor-3"),
    ],
)
def test_exact(spec: Spec, plan: plans.Plan) -> None:
    """Also the gradients of K and V, summed over the copies."""
    length = 24 if "tensor" in plan["mesh"] and plan["mesh"]["tensor"] == 3 else 16
    for rank, outcome in enumerate(train_once(plan, spec, seq=length)):
        assert outcome.loss <= 1, rank
        assert outcome.logits <= 1, rank
        assert outcome.gradient <= 1, (rank, outcome.worst)


@pytest.mark.parametrize(
    ("spec", "plan", "code", "words", "legal"),
    [
        pytest.param(THREE, plans.ulysses(2), "SC202", ("3 KV heads", "degree 2"), (1, 3, 6),
                     id="d-3-of-6-ulysses-2"),
        pytest.param(Spec(), plans.ulysses(3), "SC201", ("4 query heads", "degree 3"), (1, 2, 4),
                     id="e-4-ulysses-3"),
        pytest.param(THREE, plans.megatron(2), "SC204", ("3 KV heads", "degree 2"), (1, 3, 6),
                     id="d-3-of-6-tensor-2"),
        pytest.param(Spec(mlp=96), plans.megatron(3), "SC203", ("4 query heads", "degree 3"),
                     (1, 2, 4), id="e-4-tensor-3"),
    ],
)  # fmt: skip
def test_refused_by_name(
    spec: Spec, plan: plans.Plan, code: str, words: tuple[str, ...], legal: tuple[int, ...]
) -> None:
    """Before anything runs, with the layer, the heads, the degree and the degrees that fit."""
    with pytest.raises(seqcomp.PlanError) as caught:
        lockstep(lambda: build(spec), plan, lambda model, context, local: model(**local),
                 inputs=inputs(spec, seq=24))  # fmt: skip
    (found,) = [d for d in caught.value.diagnostics if d.severity == "error"]
    assert found.code == code
    assert found.legal == legal
    text = str(found)
    for word in (*words, "layers.0.attn", f"{spec.heads} query heads", f"{spec.kv_heads} KV heads"):
        assert word in text, text
    assert ("pad_heads: true" in text) == ("ulysses" in plan["mesh"])


SEVEN = Spec(hidden=56, heads=28, kv_heads=4, head_dim=2, layers=1, causal=(True,))


@pytest.mark.parametrize(
    ("spec", "plan", "seq"),
    [
        pytest.param(THREE, plans.ulysses(2, pad_heads=True), 16, id="d-3-of-6-ulysses-2"),
        pytest.param(Spec(), plans.ulysses(3, pad_heads=True), 24, id="e-2-of-4-ulysses-3"),
        pytest.param(Spec(kv_heads=4), plans.ulysses(3, pad_heads=True), 24, id="4-of-4-ulysses-3"),
        pytest.param(ONE, plans.ulysses(3, pad_heads=True), 24, id="1-of-4-ulysses-3"),
        pytest.param(Spec(), plans.ulysses(8, pad_heads=True), 16, id="2-of-4-ulysses-8"),
        pytest.param(SEVEN, plans.ulysses(7, pad_heads=True), 28, id="4-of-28-ulysses-7"),
        pytest.param(THREE, plans.usp(2, 2, "zigzag", pad_heads=True), 16, id="3-of-6-usp"),
        pytest.param(Spec(), plans.usp(2, 3, "striped", pad_heads=True), 24, id="2-of-4-usp"),
        pytest.param(Spec(vocab=96), plans.with_tensor(plans.ulysses(3, pad_heads=True), 2), 24,
                     id="1-of-2-ulysses-3-of-tensor-2"),
        pytest.param(Spec(), plans.with_data(plans.ulysses(3, pad_heads=True), 2), 24,
                     id="2-of-4-ulysses-3-beside-data"),
    ],
)  # fmt: skip
def test_padded_heads_are_exact(spec: Spec, plan: plans.Plan, seq: int) -> None:
    """They leave no trace, say what they cost, and cost what the report says."""
    for rank, outcome in enumerate(train_once(plan, spec, seq=seq, batch=2)):
        assert outcome.loss <= 1, rank
        assert outcome.logits <= 1, rank
        assert outcome.gradient <= 1, (rank, outcome.worst)
        assert reported(outcome.report) == outcome.traffic
        (cost,) = [d for d in outcome.report.findings if d.code == "SC411"]
        assert "layers.0.attn" in cost.message


class Biased(nn.Module):
    """5 query heads on one KV head, with a slope (ALiBi) and a trained relative bias of each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q = nn.Embedding(50, 40), nn.Linear(40, 40)
        self.kv, self.head = nn.Linear(40, 16), nn.Linear(40, 50)
        self.relative = nn.Embedding(32, 5)
        self.register_buffer("slopes", 0.5 ** torch.arange(1, 6))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """ids, labels [B, S] -> loss [], logits [B, S, V]."""
        x = self.embed(input_ids)
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 5, 8).transpose(1, 2)
        k, v = self.kv(x).view(b, s, 2, 8).transpose(1, 2).expand(b, 2, s, 8).chunk(2, 1)
        at = torch.arange(s)
        apart = at - at[:, None]
        bias = self.slopes.view(1, 5, 1, 1) * apart
        bias = bias + self.relative(apart.abs().clamp(max=31)).permute(2, 0, 1)
        bias = bias.masked_fill(apart > 0, float("-inf"))
        y = F.scaled_dot_product_attention(
            q, k.expand(b, 5, s, 8), v.expand(b, 5, s, 8), attn_mask=bias
        )
        logits = self.head(y.transpose(1, 2).reshape(b, s, 40))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def biased() -> nn.Module:
    torch.manual_seed(0)
    return Biased().double()


@pytest.mark.parametrize(
    "plan", [plans.ulysses(2, pad_heads=True), plans.usp(2, 2, pad_heads=True)], ids=plans.name
)
def test_biases_of_each_head_follow_it(plan: plans.Plan) -> None:
    ids = inputs(Spec(vocab=50), batch=3)["input_ids"]
    batch = {"input_ids": ids, "labels": ids.roll(1, 0)}
    distance, worst = on_ranks(biased, plan, batch, reference(biased, batch))
    assert distance <= 1, worst


@pytest.mark.distributed
def test_padded_heads_on_real_ranks(pools: Pools) -> None:
    check_parity(pools, Case(plans.ulysses(4, pad_heads=True), THREE))


def test_a_control_that_forgets_the_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last real head where a slot should be empty: its gradient is added twice."""
    real = heads.head_map

    def greedy(count: int, kv_heads: int, degree: int) -> heads.HeadMap:
        found = real(count, kv_heads, degree)
        queries = tuple(count - 1 if head == heads.ZERO else head for head in found.queries)
        return replace(found, queries=queries)

    monkeypatch.setattr(function, "head_map", greedy)
    five = Spec(hidden=40, heads=5, kv_heads=1)
    for outcome in train_once(plans.ulysses(2, pad_heads=True), five):
        assert outcome.logits > CLEARLY_WRONG
        assert outcome.gradient > CLEARLY_WRONG


@pytest.mark.parametrize(("heads", "degree"), [(2, 4), (1, 4), (2, 8), (4, 4)])
def test_which_rank_has_which_head(heads: int, degree: int) -> None:
    """Rank r has KV head r // (degree / heads): heads are not tiled but repeated in place."""
    x = torch.arange(heads).double().view(1, heads, 1, 1)

    def own(context: RankContext) -> float:
        return float(tensor_parallel.own_heads(x, heads, context.comm(("tensor",))))

    assert run_ranks(own, {"tensor": degree}) == [r // (degree // heads) for r in range(degree)]


def test_control_tiled_heads_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiled(x: torch.Tensor, heads: int, comm: Communicator) -> torch.Tensor:
        return x.narrow(1, comm.rank % heads, 1)

    monkeypatch.setattr(tensor_parallel, "own_heads", tiled)
    outcomes: list[Any] = train_once(plans.megatron(4), TWO)
    assert all(outcome.loss > CLEARLY_WRONG for outcome in outcomes)
    assert all(outcome.gradient > CLEARLY_WRONG for outcome in outcomes)
