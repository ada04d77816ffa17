"""Megatron-SP where heads share a key part, a key or a weight, and heads of masked models.

All exact, nothing gathered, the products divided; what every rank makes for itself is named.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import seqcomp
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import FP64, compare_grads, reference
from tests.fixtures.families import LENGTH, family_inputs
from tests.fixtures.lockstep import counted, reported, whole_gradients
from tests.fixtures.shared_heads import HEAD_DIM, HEADS, HIDDEN, VOCAB, Latent, make
from tests.fixtures.work import Work, work_of

ALONE: plans.Plan = {"mesh": {"ring": 1}, "strategies": {"ring": {}}}
TOKENS = 2 * LENGTH
CUTS = {
    "latent": {"attention.q_b.weight", "attention.kv_b.weight", "attention.o.weight"},
    "multi-query": {"attention.o"},
    "lifted": {"attention.o"},
    "grouped": {"attention.qkv.weight", "attention.qkv.bias", "attention.o.weight"},
    "masked": {"attention.o"},
}
WORDS = {"embed.weight", "decoder.weight", "decoder.bias"}


def seen(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
    model(**local)["loss"].backward()
    gradients = whole_gradients(model, context)
    compiled = seqcomp.of(model)
    codes = {f.code for f in compiled.report().findings}
    cuts = set(compiled.programs[-1].cuts)
    model.zero_grad()
    context.traffic.reset()
    work = work_of(model, VOCAB, lambda: model(**local)["loss"])
    return gradients, codes, cuts, work, counted(context) == reported(compiled.report())


def tokens() -> dict[str, Tensor]:
    return {name: ids.clamp(max=VOCAB - 1) for name, ids in family_inputs().items()}


def products(work: Work) -> int:
    return work.flops["linear"] + work.flops["head"]


PLANS = [
    plans.megatron(2),
    plans.megatron(4),
    plans.with_tensor(plans.ring(2, "zigzag"), 2),
    plans.with_tensor(plans.ulysses(2), 2),
]
# 2 groups of heads are cut over 2 ranks.
CASES = [(kind, p) for kind in CUTS for p in PLANS if kind != "grouped" or p["mesh"]["tensor"] == 2]


@pytest.mark.parametrize(
    ("kind", "plan"), CASES, ids=lambda v: v if isinstance(v, str) else plans.name(v)
)
def test_exact_and_divided(kind: str, plan: plans.Plan) -> None:
    degree = plan["mesh"]["tensor"]
    batch = tokens()
    want = reference(lambda: make(kind), batch)
    single = products(lockstep(lambda: make(kind), ALONE, seen, inputs=batch)[0][3])
    repeated = 0
    if kind in ("multi-query", "lifted", "masked"):  # one key and value: on every tensor rank
        repeated = 3 * 2 * TOKENS * HIDDEN * 2 * HEAD_DIM
    ranks = lockstep(lambda: make(kind), plan, seen, inputs=batch)
    for gradients, codes, cuts, work, said in ranks:
        gradient, worst = compare_grads(want.gradients, gradients, FP64)
        assert gradient <= 1, worst
        assert "SC401" not in codes
        assert ("SC402" in codes) == bool(repeated)
        assert cuts == CUTS[kind] | WORDS
        assert said
        outer = len(ranks) // degree
        own = (single - repeated) // len(ranks) + repeated // outer
        if kind == "latent" and outer > 1:
            # Values of another width: tiles of scores are products too, made again in backward,
            # and those that the mask hides are left out.
            scores = 2 * TOKENS * HEADS * LENGTH * (Latent.NOPE + Latent.ROPE) // len(ranks)
            assert 0.95 * own <= products(work) <= own + scores
        else:
            assert products(work) == own


def test_groups_that_do_not_divide_stay_whole() -> None:
    """2 groups of heads on 4 ranks: exact, by tokens, and said."""
    batch = tokens()
    want = reference(lambda: make("grouped"), batch)
    for gradients, codes, cuts, _, _ in lockstep(
        lambda: make("grouped"), plans.megatron(4), seen, inputs=batch
    ):
        gradient, worst = compare_grads(want.gradients, gradients, FP64)
        assert gradient <= 1, worst
        assert "SC405" in codes
        assert "SC401" not in codes
        assert cuts == WORDS
