"""Case 12: no attention call escapes, and nothing else that mixes the sequence runs locally."""

from __future__ import annotations

import pytest

from tests.fixtures import faults, plans
from tests.fixtures.compare import reference
from tests.fixtures.lockstep import train_once
from tests.fixtures.models import Spec, build, inputs
from tests.fixtures.parity import Case, check_parity
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


@pytest.mark.parametrize("name", sorted(set(SPECS) - {"gather"}))
def test_control_a_local_run_is_seen(name: str) -> None:
    spec = SPECS[name]
    right = faults.single(spec)
    faulty = faults.run_locally(spec, 2)
    faults.assert_shows(
        type(right)(right.loss, right.logits), type(faulty)(faulty.loss, faulty.logits)
    )


def test_control_a_token_counted_within_its_shard_is_seen() -> None:
    spec = SPECS["gather"]
    batch = inputs(spec)
    half = batch["input_ids"].shape[1] // 2
    counted = {**batch, "lengths": (batch["lengths"] - 1) % half + 1}
    faults.assert_shows(faults.single(spec), reference(lambda: build(spec), counted))


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
@pytest.mark.parametrize("name", SPECS)
def test_every_way_is_exact(pools: Pools, name: str, plan: plans.Plan) -> None:
    """Loss, logits and every gradient, on every rank."""
    check_parity(pools, Case(plan, SPECS[name]))


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
@pytest.mark.parametrize("name", ["conv", "cumsum", "mean", "last", "gather"])
def test_and_not_by_gathering_the_sequence(name: str, plan: plans.Plan) -> None:
    for outcome in train_once(plan, SPECS[name]):
        assert max(outcome.loss, outcome.logits, outcome.gradient) <= 1
        assert not any(finding.code == "SC401" for finding in outcome.report.findings)
