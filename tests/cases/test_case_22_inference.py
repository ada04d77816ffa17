"""Case 22 (a, b): inference gives full logits in the original order, at every legal length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fixtures import faults, plans
from tests.fixtures.compare import Reference, value_distance
from tests.fixtures.models import M0, build, inputs
from tests.fixtures.parity import Call, Case, check_parity
from tests.fixtures.pool import Pools

PLANS = (plans.ring(2, "zigzag"), plans.ring(2, "contiguous"), plans.ulysses(2))
QUIET = tuple(Call({"with_labels": False}, mode=mode) for mode in ("eval", "no_grad", "inference"))


def test_control_logits_in_the_order_of_the_ranks_are_seen() -> None:
    logits = faults.single(M0).logits
    assert logits is not None
    chunks = logits.chunk(4, dim=1)
    by_rank = torch.cat([chunks[i] for i in (0, 3, 1, 2)], dim=1)
    faults.assert_shows(Reference(None, logits), Reference(None, by_rank))


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_full_logits(pools: Pools, plan: plans.Plan) -> None:
    calls = (Call({"with_labels": False}, mode="no_grad"), *QUIET[2:], Call())
    check_parity(pools, Case(plan, M0, calls))


def grow(rank: int, world: int, plan: Any) -> list[str]:
    """Greedy decoding by re-running the growing prompt: per length `same`, `wrong` or a code."""
    import seqcomp

    model = seqcomp.parallelize(build().eval(), plan=plan)
    whole = build().eval()
    ids = inputs(with_labels=False, batch=1)["input_ids"]
    seen = []
    with torch.no_grad():
        for _ in range(6):
            want = whole(ids)["logits"]
            try:
                got = model(ids)["logits"]
            except seqcomp.PlanError as error:
                seen.append(",".join(d.code for d in error.diagnostics))
            else:
                same = value_distance(want, got) <= 1
                seen.append("same" if same else "wrong")
            ids = torch.cat([ids, want[:, -1:].argmax(-1)], dim=1)
    seqcomp.of(model).close()
    return seen


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_growing_prompt(pools: Pools, plan: plans.Plan) -> None:
    """Lengths 16 to 21: what the factor divides is exact, the rest is refused, in any order."""
    factor = 4 if plan["strategies"].get("ring", {}).get("layout") == "zigzag" else 2
    want = ["same" if length % factor == 0 else "SC206" for length in range(16, 22)]
    assert pools.run(2, grow, plan) == [want, want]
