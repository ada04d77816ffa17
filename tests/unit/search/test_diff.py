"""What one plan changes against another."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seqcomp.cost.estimate import estimate
from seqcomp.cost.run import Run
from seqcomp.cost.workload import workload_of
from seqcomp.search.diff import Difference, diff
from tests.fixtures.pricing import SMALL, ideal, planned

CLUSTER = ideal(inter=1e9, gpus_per_node=2)


def between(before: Any, after: Any, **run: Any) -> Difference:
    return diff(planned(before), planned(after), SMALL, CLUSTER, Run(4096, **run))


def test_a_plan_does_not_differ_from_itself() -> None:
    same = between("usp_2x2", {"mesh": {"ring": 2, "ulysses": 2}, "strategies": {
        "ring": {"layout": "zigzag"}, "ulysses": {}}})  # fmt: skip
    assert same.settings == ()
    assert {term.change for term in same.terms} == {0}


def test_terms_are_those_of_the_estimates() -> None:
    plans = [planned(name) for name in ("ring_4", "ulysses_4")]
    run = Run(4096, 2)
    found = diff(plans[0], plans[1], SMALL, CLUSTER, run)
    first, second = (estimate(plan, SMALL, CLUSTER, run) for plan in plans)
    terms = {term.what: term for term in found.terms}
    assert terms["step"].change == second.step_seconds - first.step_seconds
    assert terms["peak"].after == second.peak_bytes
    sent = [workload_of(plan, SMALL, run).bytes_sent(SMALL) for plan in plans]
    assert [terms["sent"].before, terms["sent"].after] == sent
    assert terms["sent over ring"].after == 0 < terms["sent over ulysses"].after
    assert terms["waiting for ulysses"].before == 0


def test_settings_are_places_in_the_plan() -> None:
    found = between("ring_4", "usp_2x2")
    assert ("mesh.ring", 4, 2) in found.settings
    assert ("mesh.ulysses", None, 2) in found.settings
    assert ("strategies.ring.layout", None, "zigzag") in found.settings


def test_the_order_of_a_mesh_is_a_setting() -> None:
    strategies = {"ring": {}, "ulysses": {}}
    found = between(
        {"mesh": {"ring": 4, "ulysses": 2}, "strategies": strategies},
        {"mesh": {"ulysses": 2, "ring": 4}, "strategies": strategies},
    )
    assert found.settings == (("mesh", ["ring", "ulysses"], ["ulysses", "ring"]),)
    terms = {term.what: term for term in found.terms}
    assert terms["sent"].change == 0
    assert terms["step"].change > 0, "an exchange between nodes instead of within"


@pytest.mark.parametrize("mode", ["train", "prefill"])
def test_it_is_json(mode: str) -> None:
    found = between("ring_4", "ring_2+megatron_sp_2+fsdp", mode=mode)
    assert json.loads(json.dumps(found.to_json())) == found.to_json()
    assert {term["unit"] for term in found.to_json()["terms"]} == {"s", "B"}
