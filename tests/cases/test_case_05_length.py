"""Case 5: a length that the degree does not divide is refused before the first collective, or
padded inside where the plan says so, and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqcomp
from seqcomp.lowering import padding
from seqcomp.runtime import collectives
from seqcomp.runtime.attention import tiling
from seqcomp.runtime.comm import RankContext
from seqcomp.runtime.threads import run_ranks
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import (
    CLEARLY_WRONG,
    FP64,
    compare_grads,
    reference,
    value_distance,
)
from tests.fixtures.lockstep import reported, train_once, whole_gradients
from tests.fixtures.masked_parity import on_ranks
from tests.fixtures.models import M0, M0_BI, Spec, build, inputs
from tests.fixtures.parity import Call, Case, check_parity, check_refused
from tests.fixtures.pool import Pools


@pytest.mark.distributed
@pytest.mark.parametrize("seq", [15, 17])
@pytest.mark.parametrize("plan", [plans.ulysses(2), plans.ring(2, "contiguous")], ids=plans.name)
def test_refused_with_length_and_factor(pools: Pools, plan: plans.Plan, seq: int) -> None:
    case = Case(plan, M0, (Call({"seq": seq}),))
    assert check_refused(pools, case, str(seq), "2", "padding: pad") == ("SC206",)


@pytest.mark.distributed
def test_fewer_tokens_than_ranks(pools: Pools) -> None:
    case = Case(plans.ring(4, "contiguous"), M0, (Call({"seq": 3}),))
    assert check_refused(pools, case, "3", "4") == ("SC206",)


@pytest.mark.distributed
def test_zigzag_needs_twice_the_degree(pools: Pools) -> None:
    case = Case(plans.ring(2, "zigzag"), M0, (Call({"seq": 6}),))
    assert check_refused(pools, case, "6", "4") == ("SC206",)


@pytest.mark.distributed
def test_a_legal_length_after_a_refused_one(pools: Pools) -> None:
    """Nothing is left behind by a refusal: the next model on the same ranks is exact."""
    check_refused(pools, Case(plans.ulysses(2), M0, (Call({"seq": 16}), Call({"seq": 15}))), "15")
    check_parity(pools, Case(plans.ulysses(2)))


EVEN = Spec(vocab=96)
EVEN_BI = Spec(vocab=96, causal=(False, False), labels="shifted")


def check_padded(plan: plans.Plan, spec: Spec = EVEN, **sizes: Any) -> None:
    for rank, outcome in enumerate(train_once(plans.padded(plan), spec, **sizes)):
        assert outcome.loss <= 1, rank
        assert outcome.logits <= 1, rank
        assert outcome.gradient <= 1, (rank, outcome.worst)
        assert reported(outcome.report) == outcome.traffic


@pytest.mark.parametrize(
    ("plan", "seq"),
    plans.in_turn(
        [
            plans.ulysses(2),
            plans.ring(2, "contiguous"),
            plans.megatron(2),
            *(plans.ring(4, layout) for layout in plans.LAYOUTS),
            plans.ring(2, transport="allgather"),
            plans.usp(2, 2, "zigzag"),
            plans.usp(2, 3, "striped", pad_heads=True),
            plans.with_tensor(plans.ring(2), 2),
            plans.with_tensor(plans.ulysses(2), 2),
            plans.with_data(plans.ring(2), 2),
        ],
        (17, 15),
    ),
    ids=lambda p: plans.name(p) if isinstance(p, dict) else str(p),
)
def test_padded(plan: plans.Plan, seq: int) -> None:
    check_padded(plan, seq=seq, batch=2)


@pytest.mark.parametrize(
    "plan",
    [plans.ring(4, layout) for layout in plans.LAYOUTS]
    + [plans.ulysses(4), plans.megatron(4), plans.usp(2, 2), plans.with_data(plans.ring(4), 2)],
    ids=plans.name,
)
def test_padded_with_fewer_tokens_than_ranks(plan: plans.Plan) -> None:
    """(d): some ranks have nothing but padding."""
    check_padded(plan, seq=3, batch=2)


@pytest.mark.parametrize(
    ("plan", "spec"),
    [
        (plans.ring(4, "contiguous"), EVEN_BI),  # every query must be kept from the padded keys
        (plans.ring(4, "striped"), EVEN_BI),
        (plans.usp(2, 2, "zigzag"), EVEN_BI),
        (plans.megatron(2), EVEN_BI),
        (plans.ring(2), Spec(vocab=96, prefix=5)),
        (plans.megatron(2), Spec(vocab=96, prefix=5)),
        (plans.ring(2), Spec(vocab=96, mixer="cumsum")),
        (plans.ulysses(2), Spec(vocab=96, mixer="conv")),
        (plans.ring(2), Spec(vocab=96, positions="learned", loss="sum")),
        (plans.ring(2), Spec(vocab=96, output="mean")),
        (plans.ring(2), Spec(vocab=96, output="gather")),
        (plans.ring(2), Spec(vocab=96, labels="padded", transposed=True)),
        (plans.with_tensor(plans.ring(2), 2), Spec(vocab=97, tied=True, bias=True)),
    ],
    ids=lambda p: plans.name(p) if isinstance(p, dict) else "",
)
def test_padded_models(plan: plans.Plan, spec: Spec) -> None:
    for rank, outcome in enumerate(train_once(plans.padded(plan), spec, seq=13, batch=3)):
        assert max(outcome.loss, outcome.logits, outcome.gradient) <= 1, (rank, outcome.worst)


def test_one_program_for_all_lengths() -> None:
    """Also those that need no padding; batches differ too."""

    batches = [
        inputs(M0, batch=batch, seq=seq) for batch, seq in ((2, 16), (4, 13), (3, 5), (2, 24))
    ]
    # Made before the ranks start: building a model sets torch's default dtype for a moment.
    wanted = [reference(build, given) for given in batches]

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        found = []
        for given, want in zip(batches, wanted, strict=True):
            model.zero_grad()
            out = model(**given)
            out["loss"].backward()
            gradients = compare_grads(want.gradients, whole_gradients(model, context), FP64)
            found.append(max(value_distance(want.loss, out["loss"], FP64), gradients[0]))
        return found, len(seqcomp.of(model).programs)

    plan = plans.padded(plans.ring(2, "zigzag"))
    for distances, programs in lockstep(build, plan, step, inputs=inputs()):
        assert max(distances) <= 1
        assert programs == 1


class Masked(nn.Module):
    """5 query heads on one KV head, and samples of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q = nn.Embedding(96, 40), nn.Linear(40, 40)
        self.kv, self.head = nn.Linear(40, 16), nn.Linear(40, 96)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Any]:
        """ids, mask, labels [B, S] -> loss [], logits [B, S, V]."""
        x = self.embed(input_ids)
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 5, 8).transpose(1, 2)
        k, v = self.kv(x).view(b, s, 2, 8).transpose(1, 2).chunk(2, 1)
        at = torch.arange(s)
        seen = (at <= at[:, None]) & attention_mask[:, None, None, :].bool()
        y = F.scaled_dot_product_attention(
            q, k.expand(b, 5, s, 8), v.expand(b, 5, s, 8), attn_mask=seen
        )
        logits = self.head(y.transpose(1, 2).reshape(b, s, 40))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def masked() -> nn.Module:
    torch.manual_seed(0)
    return Masked().double()


@pytest.mark.parametrize(
    "plan",
    [
        plans.ulysses(2, pad_heads=True),
        plans.ulysses(3, pad_heads=True),
        plans.usp(2, 2, "zigzag", pad_heads=True),
        plans.usp(2, 2, "striped", pad_heads=True),
        plans.ring(4, "contiguous"),
    ],
    ids=plans.name,
)
def test_heads_lengths_and_samples_that_do_not_fit_all_at_once(plan: plans.Plan) -> None:
    length = 13
    ids = inputs(Spec(vocab=96), batch=3, seq=length)["input_ids"]
    ends = torch.tensor([13, 7, 2])
    mask = (torch.arange(length) < ends[:, None]).long()
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.roll(1, 0).masked_fill(mask == 0, -100),
    }
    distance, worst = on_ranks(masked, plans.padded(plan), batch, reference(masked, batch))
    assert distance <= 1, worst


@pytest.mark.distributed
def test_padded_on_real_ranks(pools: Pools) -> None:
    calls = (Call({"seq": 15}), Call({"seq": 3, "batch": 3}), Call({"seq": 16}))
    check_parity(pools, Case(plans.padded(plans.usp(2, 2, "zigzag")), M0, calls))
    check_parity(pools, Case(plans.padded(plans.megatron(2)), M0, calls))


class Fixed(nn.Module):
    """A model that only takes one length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(9, 8), nn.Linear(15, 15)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.mix(self.embed(input_ids).mT)


def test_a_model_that_fixes_its_length_is_refused() -> None:
    ids = torch.zeros(2, 15, dtype=torch.int64)
    with pytest.raises(seqcomp.PlanError, match="SC212"):
        lockstep(Fixed, plans.padded(plans.ulysses(2)), lambda m, c, local: m(**local),
                 inputs={"input_ids": ids})  # fmt: skip


def test_sharded_outputs_are_refused() -> None:
    plan = {**plans.padded(plans.ring(2)), "outputs": {"logits": "sharded"}}
    found = [d for d in seqcomp.validate(plan) if d.severity == "error"]
    assert [d.code for d in found] == ["SC212"]


def test_control_sums_that_see_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding.PaddedLoss, "of", staticmethod(lambda *_: None))
    shifted = Spec(labels="shifted")  # with a label for the last token, and for its copies
    for outcome in train_once(plans.padded(plans.ring(2)), shifted, seq=13):
        assert outcome.loss > CLEARLY_WRONG


def test_control_queries_that_see_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "before", lambda ranges, length: tuple(ranges))
    for outcome in train_once(plans.padded(plans.ring(2, "contiguous")), M0_BI, seq=13):
        assert outcome.logits > CLEARLY_WRONG


def test_padding_is_made_of_copies() -> None:
    """Of the last token: what is finite for tokens is finite for padding, also in backward."""

    def step(context: RankContext) -> Tensor:
        x = torch.arange(1.0, 4.0).requires_grad_()
        own = collectives.shard(x, 0, context.comm(("ring",)), padded=4)
        own.log().sum().backward()
        return own.detach()

    assert [x.tolist() for x in run_ranks(step, {"ring": 2})] == [[1.0, 2.0], [3.0, 3.0]]
