"""Case 12: no attention call escapes, and nothing else that mixes the sequence runs locally."""

from __future__ import annotations

import pytest

from tests.fixtures import faults, plans
from tests.fixtures.models import Spec
from tests.fixtures.parity import Case, check_parity, check_parity_or_refused
from tests.fixtures.pool import Pools

PLANS = (plans.ring(2, "contiguous"), plans.ring(2, "zigzag"))
SPECS = {
    "renamed": Spec(attention="renamed"),
    "scaled": Spec(attention="scaled"),
    "expanded": Spec(attention="expanded"),
    "eager": Spec(attention="eager"),
    "module": Spec(attention="module", positions="learned"),
    "conv": Spec(mixer="conv"),
    "cumsum": Spec(mixer="cumsum"),
    "mean": Spec(output="mean"),
    "last": Spec(output="last"),
    "gather": Spec(output="gather"),
}
MUST_RUN = ("renamed", "scaled", "expanded")


@pytest.mark.parametrize("name", sorted(set(SPECS) - {"gather"}))
def test_control_a_local_run_is_seen(name: str) -> None:
    spec = SPECS[name]
    right = faults.single(spec)
    faulty = faults.run_locally(spec, 2)
    faults.assert_shows(
        type(right)(right.loss, right.logits), type(faulty)(faulty.loss, faulty.logits)
    )


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
@pytest.mark.parametrize("name", MUST_RUN)
def test_attention_under_any_name(pools: Pools, name: str, plan: plans.Plan) -> None:
    check_parity(pools, Case(plan, SPECS[name]))


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
@pytest.mark.parametrize("name", sorted(set(SPECS) - set(MUST_RUN)))
def test_other_mixing_is_exact_or_refused(pools: Pools, name: str, plan: plans.Plan) -> None:
    check_parity_or_refused(pools, Case(plan, SPECS[name]))
