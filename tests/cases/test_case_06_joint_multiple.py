"""Case 6: two axes that cut the sequence need a multiple of r * lcm(2, u), not of more or less."""

from __future__ import annotations

import pytest

import seqcomp
from tests.fixtures import plans
from tests.fixtures.models import M0
from tests.fixtures.parity import Call, Case, check_parity, check_refused
from tests.fixtures.pool import Pools

PLANS = (plans.usp(2, 2, "zigzag"), plans.with_tensor(plans.ring(2, "zigzag"), 2))
ALLOWED = tuple(Call({"batch": b, "seq": s}) for b in (1, 2) for s in (16, 12, 8))


@pytest.mark.parametrize(
    ("ring", "inner", "factor"),
    [(2, 2, 4), (2, 3, 12), (2, 4, 8), (4, 3, 24), (4, 4, 16), (1, 4, 4)],
)
def test_factor_of_zigzag(ring: int, inner: int, factor: int) -> None:
    plan = plans.usp(ring, inner, "zigzag")
    for seq in range(1, 8 * factor + 1):
        found = seqcomp.validate(plan, world_size=ring * inner, seq_len=seq)
        errors = [d for d in found if d.severity == "error"]
        if seq % factor == 0:
            assert errors == []
        else:
            assert [d.code for d in errors] == ["SC206"]
            assert str(factor) in str(errors[0])


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_allowed_lengths_and_batches(pools: Pools, plan: plans.Plan) -> None:
    check_parity(pools, Case(plan, M0, ALLOWED))


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
@pytest.mark.parametrize("seq", [6, 14])
def test_other_lengths_name_the_factor(pools: Pools, plan: plans.Plan, seq: int) -> None:
    case = Case(plan, M0, (Call({"seq": seq}),))
    assert check_refused(pools, case, str(seq), "4") == ("SC206",)
