"""Case 19, the model's part: batches above 1, and gradients that are not contiguous."""

from __future__ import annotations

import pytest

from tests.fixtures import faults, plans
from tests.fixtures.compare import Reference
from tests.fixtures.models import M0, Spec, build, inputs
from tests.fixtures.parity import Call, Case, check_parity
from tests.fixtures.pool import Pools

PLANS = (plans.ulysses(2), plans.ulysses(4), plans.usp(2, 2, "zigzag"), plans.ring(2, "zigzag"))
TRANSPOSED = Spec(transposed=True)


def test_control_a_reshape_that_mixes_batch_and_sequence_is_seen() -> None:
    """The exchange without moving the batch axis back: the same elements in another order."""
    logits = build()(**inputs(batch=3))["logits"].detach()
    b, s, v = logits.shape
    scrambled = logits.view(b, 2, s // 2, v).transpose(0, 1).reshape(b, s, v)
    faults.assert_shows(Reference(None, logits), Reference(None, scrambled))


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_batch_of_three_and_transposed_losses(pools: Pools, plan: plans.Plan) -> None:
    calls = tuple(Call({"batch": b}) for b in (3, 1, 2))
    check_parity(pools, Case(plan, TRANSPOSED, calls))
    check_parity(pools, Case(plan, M0, (Call({"batch": 3}, objective="logits"),)))
