"""Case 8: packed documents do not see each other, however the mask is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import CLEARLY_WRONG, FP64, compare_grads, reference, value_distance
from tests.fixtures.documents import PACKINGS, build_kind, packed
from tests.fixtures.lockstep import whole_gradients
from tests.fixtures.parity import Call, Case, check_parity
from tests.fixtures.plans import Plan
from tests.fixtures.pool import Pools

KINDS = ("additive", "resets")
PLANS: tuple[Plan, ...] = (
    *(plans.ring(degree, layout) for degree in (2, 4) for layout in plans.LAYOUTS),
    plans.ulysses(2),
    plans.usp(2, 2, "zigzag"),
)


def logits_of(kind: str, plan: Plan, batch: dict[str, Tensor]) -> Tensor:
    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Tensor:
        return model(**local)["logits"].detach()

    return lockstep(lambda: build_kind(kind), plan, step, inputs=batch, prepare=True)[0]


def test_control_a_mask_that_is_dropped_is_seen() -> None:
    right = reference(lambda: build_kind("segments"), packed("segments"))
    leaked = reference(lambda: build_kind("causal"), packed("segments"))
    assert value_distance(right.logits, leaked.logits, FP64) > CLEARLY_WRONG
    assert compare_grads(right.gradients, leaked.gradients, FP64)[0] > CLEARLY_WRONG


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_documents_equal_one_device(kind: str, plan: Plan) -> None:
    batch = packed(kind)
    want = reference(lambda: build_kind(kind), batch)

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> float:
        out = model(**local)
        out["loss"].backward()
        gradient, _ = compare_grads(want.gradients, whole_gradients(model, context), FP64)
        return max(gradient, value_distance(want.logits, out["logits"], FP64))

    distances = lockstep(lambda: build_kind(kind), plan, step, inputs=batch, prepare=True)
    assert max(distances) <= 1


@pytest.mark.parametrize("plan", [PLANS[2], PLANS[4], PLANS[6]], ids=plans.name)
@pytest.mark.parametrize("kind", ["bool", "segments"])
def test_a_token_of_one_document_moves_no_logit_of_another(kind: str, plan: Plan) -> None:
    probe = 2  # in the first document of both rows
    before = logits_of(kind, plan, packed(kind))
    after = logits_of(kind, plan, packed(kind, probe=probe))
    for row, lengths in enumerate(PACKINGS):
        moved = (before[row] - after[row]).abs().amax(-1)
        assert torch.equal(moved[lengths[0] :], torch.zeros_like(moved[lengths[0] :]))
        assert moved[probe : lengths[0]].min() > 0.01, "the probe shows nothing"


def test_control_the_probe_moves_logits_where_the_mask_is_dropped() -> None:
    batches = (packed("causal"), packed("causal", probe=2))
    before, after = (logits_of("causal", PLANS[2], batch) for batch in batches)
    assert (before - after)[:, 11:].abs().amax() > 0.01


@pytest.mark.distributed
@pytest.mark.parametrize("plan", [plans.ring(2, "zigzag"), plans.usp(2, 2)], ids=plans.name)
def test_documents_on_real_ranks(pools: Pools, plan: Plan) -> None:
    for kind in ("bool", "resets"):
        calls = (Call(), Call({"probe": 2}))
        check_parity(pools, Case(plan, kind, calls, build=build_kind, make_inputs=packed))
