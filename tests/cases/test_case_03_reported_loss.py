"""Case 3: the loss is one number on all ranks, in training and in evaluation."""

from __future__ import annotations

import pytest

from tests.fixtures import faults, plans
from tests.fixtures.models import Spec
from tests.fixtures.parity import Call, Case, check_parity
from tests.fixtures.pool import Pools

SPEC = Spec(vocab=96)
CALLS = (
    Call({"valid": (2, 11)}, mode="train"),
    Call({"valid": (2, 11)}, mode="eval"),
    Call({"valid": (2, 11)}, mode="no_grad"),
)
PLANS = (
    plans.usp(2, 2, "zigzag"),
    plans.with_data(plans.ring(2, "contiguous"), 2),
    plans.with_data(plans.ulysses(2), 2),
    plans.with_tensor(plans.ring(2, "zigzag"), 2),
    plans.with_tensor(plans.ulysses(2), 2),
)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_control_a_clean_factor_is_seen(factor: float) -> None:
    right = faults.single(SPEC, valid=(2, 11))
    faults.assert_shows(right, faults.scaled(right, factor))


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_train_and_eval(pools: Pools, plan: plans.Plan) -> None:
    check_parity(pools, Case(plan, SPEC, CALLS))
