"""Case 14: gradients are those of the concatenated batch, with no factor of any degree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fixtures import faults, plans
from tests.fixtures.compare import compare_grads, gradients_of, reference
from tests.fixtures.compare import whole as full
from tests.fixtures.models import M0, build, inputs
from tests.fixtures.parity import Call, Case, check_parity, data_slice, slice_batch
from tests.fixtures.pool import Pools

LR = 0.1
PLANS = (
    plans.ring(4, "zigzag"),
    plans.with_data(plans.ring(2, "zigzag"), 2),
    {"mesh": {"ring": 2, "data": 2}, "strategies": {"ring": {"layout": "striped"}, "data": {}}},
    plans.with_data(plans.megatron(2), 2),
    plans.with_tensor(plans.ring(2, "zigzag"), 2),
)


@pytest.mark.parametrize("factor", [2.0, 4.0, 0.5])
def test_control_a_factor_is_seen(factor: float) -> None:
    right = faults.single(M0)
    faults.assert_shows(right, faults.scaled(right, factor))


def test_control_gradients_of_a_part_of_the_batch_are_seen() -> None:
    half = {name: slice_batch(value, 0, 2) for name, value in inputs(batch=4).items()}
    faults.assert_shows(faults.single(M0, batch=4), reference(build, half))


def step(rank: int, world: int, plan: dict[str, Any]) -> dict[str, Any]:
    """One SGD step; how far gradients and weights are from one process, and their ratio."""
    import seqcomp

    batch = inputs(batch=4)
    whole = build()
    whole(**batch)["loss"].backward()
    want = gradients_of(whole)
    torch.optim.SGD(whole.parameters(), lr=LR).step()

    model = seqcomp.parallelize(build(), plan=plan)
    part, parts = data_slice(plan, rank)
    out = model(**{name: slice_batch(value, part, parts) for name, value in batch.items()})
    out["loss"].backward()
    got = gradients_of(model)
    torch.optim.SGD(model.parameters(), lr=LR).step()
    found = {name: full(p.detach()) for name, p in model.named_parameters()}
    seqcomp.of(model).close()
    weights = compare_grads(dict(whole.named_parameters()), found)
    ratios = {
        name: float((got[name].flatten() @ g.flatten()) / (g.flatten() @ g.flatten()))
        for name, g in want.items()
    }
    return {
        "gradient": compare_grads(want, got)[0],
        "weights": weights[0],
        "ratios": ratios,
        "bytes": [p.numpy().tobytes() for p in found.values()],
    }


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_gradients_and_one_step(pools: Pools, plan: plans.Plan) -> None:
    ranks = pools.run(4, step, plan)
    for result in ranks:
        assert result["ratios"] == pytest.approx(dict.fromkeys(result["ratios"], 1.0), abs=1e-9)
        assert result["gradient"] <= 1
        assert result["weights"] <= 1
        assert result["bytes"] == ranks[0]["bytes"], "replicas drift apart"


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_a_loss_made_from_full_outputs_counts_once(pools: Pools, plan: plans.Plan) -> None:
    check_parity(pools, Case(plan, M0, (Call({"batch": 4}, objective="logits"),)))
