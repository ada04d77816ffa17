"""Case 2: labels are shifted on the global sequence, before it is cut."""

from __future__ import annotations

import pytest

from tests.fixtures import faults, plans
from tests.fixtures.models import M0, Spec
from tests.fixtures.parity import Case, check_parity
from tests.fixtures.pool import Pools

PLANS = (plans.ring(2, "contiguous"), plans.ring(4, "contiguous"), plans.ulysses(2))


@pytest.mark.parametrize("degree", [2, 4])
def test_control_shift_after_shard_is_seen(degree: int) -> None:
    faulty = faults.with_loss(M0, lambda x, y: faults.shift_after_shard(x, y, degree))
    faults.assert_shows(faults.single(M0), faulty)


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
@pytest.mark.parametrize("style", ["inside", "shifted", "padded"])
def test_shift(pools: Pools, style: str, plan: plans.Plan) -> None:
    """`inside` slices S logits to S - 1, which no degree divides."""
    check_parity(pools, Case(plan, Spec(labels=style)))


@pytest.mark.distributed
def test_shift_beyond_the_kv_heads_and_under_a_permutation(pools: Pools) -> None:
    check_parity(pools, Case(plans.ulysses(4)))
    check_parity(pools, Case(plans.ring(4, "zigzag")))
