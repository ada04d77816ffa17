"""The boundaries: outputs in full, sharded or dropped, and what a loss made from them means."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fixtures import plans
from tests.fixtures.compare import compare_grads, gradients_of, value_distance
from tests.fixtures.models import build, inputs
from tests.fixtures.parity import data_slice, slice_batch
from tests.fixtures.pool import Pools

pytestmark = pytest.mark.distributed
PLANS = (
    plans.ring(2, "zigzag"),
    plans.usp(2, 2, "striped"),
    plans.with_data(plans.ulysses(2), 2),
)


def ranks(plan: plans.Plan) -> int:
    return math.prod(plan["mesh"].values())


def sharded(rank: int, world: int, plan: plans.Plan) -> dict[str, Any]:
    """Logits stay where they are; each rank adds its own tokens to the loss."""
    import seqcomp

    batch = inputs(batch=4, with_labels=False)
    weights = torch.randn(4, 16, 97, generator=torch.Generator().manual_seed(3)).double()
    whole = build()
    full = whole(**batch)["logits"]
    (full.tanh() * weights).sum().backward()

    model = seqcomp.parallelize(build(), plan={**plan, "outputs": {"logits": "sharded"}})
    part, parts = data_slice(plan, rank)
    local = model(**{name: slice_batch(value, part, parts) for name, value in batch.items()})
    index = seqcomp.of(model).token_index()
    own = slice_batch(weights, part, parts)[:, index]
    (local["logits"].tanh() * own).sum().backward()
    wanted = slice_batch(full.detach(), part, parts)
    seen = {
        "shape": tuple(local["logits"].shape),
        "index": index.tolist(),
        "local": value_distance(wanted[:, index], local["logits"]),
        "gathered": value_distance(wanted, seqcomp.of(model).gather(local["logits"])),
        "gradient": compare_grads(gradients_of(whole), gradients_of(model))[0],
    }
    seqcomp.of(model).close()
    return seen


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_sharded(pools: Pools, plan: plans.Plan) -> None:
    data = plan["mesh"].get("data", 1)
    degree = ranks(plan) // data
    results = pools.run(ranks(plan), sharded, plan)
    for seen in results:
        assert seen["shape"] == (4 // data, 16 // degree, 97)
        assert max(seen["local"], seen["gathered"], seen["gradient"]) <= 1
    # Every token lives on exactly one rank of a sequence group.
    held = sorted(position for seen in results for position in seen["index"])
    assert held == sorted(list(range(16)) * data)


def dropped(rank: int, world: int, plan: plans.Plan) -> dict[str, Any]:
    import seqcomp

    batch = inputs(batch=4)
    whole = build()
    whole(**batch)["loss"].backward()
    model = seqcomp.parallelize(build(), plan={**plan, "outputs": {"logits": "drop"}})
    part, parts = data_slice(plan, rank)
    out = model(**{name: slice_batch(value, part, parts) for name, value in batch.items()})
    out["loss"].backward()
    seqcomp.of(model).close()
    return {
        "logits": out["logits"] is None,
        "gradient": compare_grads(gradients_of(whole), gradients_of(model))[0],
    }


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_dropped(pools: Pools, plan: plans.Plan) -> None:
    for seen in pools.run(ranks(plan), dropped, plan):
        assert seen["logits"]
        assert seen["gradient"] <= 1


def full_loss(rank: int, world: int, plan: plans.Plan) -> tuple[float, float]:
    """A user's own token mean from full logits: data ranks divide by the global count."""
    import seqcomp

    batch = {**inputs(batch=4, with_labels=False), "target": inputs(batch=4, seed=5)["input_ids"]}
    batch["target"][3, 2:] = -100
    whole = build()
    user_loss(whole, batch, count=4 * 16 - 14).backward()

    model = seqcomp.parallelize(build(), plan=plan)
    part, parts = data_slice(plan, rank)
    local = {name: slice_batch(value, part, parts) for name, value in batch.items()}
    count = seqcomp.of(model).global_sum((local["target"] != -100).sum())
    user_loss(model, local, count).backward()
    seqcomp.of(model).close()
    return compare_grads(gradients_of(whole), gradients_of(model))[0], float(count)


def user_loss(model: nn.Module, batch: dict[str, Tensor], count: Tensor | int) -> Tensor:
    logits = model(batch["input_ids"])["logits"]
    target = batch["target"].flatten()
    total = nn.functional.cross_entropy(logits.flatten(0, 1), target, reduction="sum")
    return total / count


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_a_users_loss_on_full_logits(pools: Pools, plan: plans.Plan) -> None:
    for worst, count in pools.run(ranks(plan), full_loss, plan):
        assert count == 50
        assert worst <= 1
