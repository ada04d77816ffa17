"""Case 11: attention that is not causal stays so, under every layout; so do prefixes."""

from __future__ import annotations

import pytest

from tests.fixtures import faults, plans
from tests.fixtures.lockstep import train_once
from tests.fixtures.models import M0_BI, Spec
from tests.fixtures.parity import Call, Case, check_parity
from tests.fixtures.pool import Pools

# Layer 0 sees everything, layer 1 is causal; the flag is left out, respectively positional.
MIXED = Spec(causal=(False, True), attention="mixed", labels="shifted")


def test_control_a_lost_flag_is_seen() -> None:
    causal = faults.single(Spec(labels="shifted"))
    faults.assert_shows(faults.single(M0_BI), causal)
    faults.assert_shows(faults.single(MIXED), causal)
    faults.assert_shows(faults.single(MIXED), faults.single(M0_BI))


def test_control_a_lost_prefix_is_seen() -> None:
    faults.assert_shows(faults.single(Spec(prefix=5)), faults.single(Spec()))


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [*plans.LAYOUTS, "auto"])
@pytest.mark.parametrize("spec", [M0_BI, MIXED], ids=["full", "mixed"])
def test_not_causal(pools: Pools, spec: Spec, layout: str) -> None:
    check_parity(pools, Case(plans.ring(2, layout), spec, (Call(), Call({"seq": 8}))))


@pytest.mark.distributed
def test_not_causal_on_four_ranks(pools: Pools) -> None:
    check_parity(pools, Case(plans.ring(4, "zigzag"), M0_BI))
    check_parity(pools, Case(plans.ring(4, "striped"), MIXED))
    check_parity(pools, Case(plans.usp(2, 2, "zigzag"), MIXED))


@pytest.mark.parametrize("layout", plans.LAYOUTS)
def test_prefix_mask_under_every_layout(layout: str) -> None:
    for plan in (plans.ring(2, layout), plans.ring(4, layout)):
        for rank in train_once(plan, Spec(prefix=5)):
            assert max(rank.loss, rank.logits, rank.gradient) <= 1, (plan, rank.worst)


@pytest.mark.distributed
@pytest.mark.parametrize("plan", [plans.ring(2, "zigzag"), plans.ulysses(2)], ids=plans.name)
def test_prefix_mask_on_real_ranks(pools: Pools, plan: plans.Plan) -> None:
    check_parity(pools, Case(plan, Spec(prefix=5)))
