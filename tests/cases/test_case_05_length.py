"""Case 5: a length that the degree does not divide is refused before the first collective."""

from __future__ import annotations

import pytest

from tests.fixtures import plans
from tests.fixtures.models import M0
from tests.fixtures.parity import Call, Case, check_parity, check_refused
from tests.fixtures.pool import Pools


@pytest.mark.distributed
@pytest.mark.parametrize("seq", [15, 17])
@pytest.mark.parametrize("plan", [plans.ulysses(2), plans.ring(2, "contiguous")], ids=plans.name)
def test_refused_with_length_and_factor(pools: Pools, plan: plans.Plan, seq: int) -> None:
    codes = check_refused(pools, Case(plan, M0, (Call({"seq": seq}),)), str(seq), "2")
    assert codes == ("SC206",)


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
