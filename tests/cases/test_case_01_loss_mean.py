"""Case 1: the mean over valid tokens is global, not a mean of the ranks' means."""

from __future__ import annotations

import pytest

from tests.fixtures import faults, plans
from tests.fixtures.models import Spec
from tests.fixtures.parity import Call, Case, check_parity
from tests.fixtures.pool import Pools

# Labels at positions 7..14: 2 per row on the first of two contiguous ranks, 14 on the other.
UNEVEN = Call({"valid": (7, 14)})
SHIFTED = Spec(labels="shifted")


@pytest.mark.parametrize("degree", [2, 4])
def test_control_mean_of_means_is_seen(degree: int) -> None:
    faulty = faults.with_loss(
        SHIFTED, lambda x, y: faults.mean_of_means(x, y, degree), valid=(7, 14)
    )
    faults.assert_shows(faults.single(SHIFTED, valid=(7, 14)), faulty)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", plans.LAYOUTS)
@pytest.mark.parametrize("degree", [2, 4])
def test_uneven_valid_counts(pools: Pools, degree: int, layout: str) -> None:
    check_parity(pools, Case(plans.ring(degree, layout), SHIFTED, (UNEVEN,)))


@pytest.mark.distributed
@pytest.mark.parametrize("plan", [plans.ulysses(2), plans.ring(4, "striped")], ids=plans.name)
@pytest.mark.parametrize("loss", ["sum", "divisor"])
def test_other_reductions(pools: Pools, loss: str, plan: plans.Plan) -> None:
    check_parity(pools, Case(plan, Spec(labels="shifted", loss=loss), (UNEVEN,)))


@pytest.mark.distributed
def test_a_data_rank_without_any_valid_label_and_no_valid_label_at_all(pools: Pools) -> None:
    plan = plans.with_data(plans.ring(2, "zigzag"), 2)
    calls = (
        Call({"batch": 4, "ignore_rows": (2, 3)}),
        Call({"batch": 4, "valid": (3, 3), "ignore_rows": (0, 1, 3)}),
        Call({"batch": 4, "ignore_rows": (0, 1, 2, 3)}),  # a mean over nothing: NaN, as on one
    )
    check_parity(pools, Case(plan, SHIFTED, calls))
