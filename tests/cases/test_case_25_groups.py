"""Case 25: groups are shared, counted and freed; compiled models know nothing of each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fixtures import plans
from tests.fixtures.compare import compare_grads, gradients_of
from tests.fixtures.models import M0, M0_MHA, Spec, build, inputs
from tests.fixtures.pool import Pools

A = plans.ring(4, "zigzag")
B = plans.with_data(plans.ulysses(2), 2)
OTHERS = (plans.usp(2, 2, "zigzag"), plans.ulysses(4), B)


def groups() -> int:
    from torch.distributed import distributed_c10d

    return len(distributed_c10d._world.pg_map)


def compile_often(rank: int, world: int) -> dict[str, Any]:
    """How the number of process groups develops."""
    import seqcomp

    start = groups()
    models = [seqcomp.parallelize(build(), plan=A) for _ in range(2)]
    for model in models:
        model(**inputs())
    same = groups()
    models += [seqcomp.parallelize(build(), plan=plan) for plan in OTHERS]
    for model in models[2:]:
        model(**inputs())
    different = groups()
    for _ in range(3):
        models[0](**inputs())["loss"].backward()
    steps = groups()
    for model in models:
        seqcomp.of(model).close()
    return {"start": start, "same": same, "different": different, "steps": steps, "end": groups()}


@pytest.mark.distributed
def test_groups_are_reused_and_freed(pools: Pools) -> None:
    for seen in pools.run(4, compile_often):
        # The ring of four, its host-side channel; then at most the pairs of the other plans,
        # and a channel each.
        assert seen["same"] - seen["start"] <= 2
        assert seen["different"] - seen["start"] <= 2 + 2 * len(OTHERS)
        assert seen["steps"] == seen["different"], "a step makes groups"
        assert seen["end"] == seen["start"], "close() leaves groups behind"


def run(model: torch.nn.Module, spec: Spec) -> tuple[torch.Tensor, dict[str, Any]]:
    model.zero_grad(set_to_none=True)
    loss = model(**inputs(spec))["loss"]
    loss.backward()
    return loss.detach(), gradients_of(model)


def two_models(rank: int, world: int) -> dict[str, bool]:
    """Whether A's results stay bit-identical whatever B does, and B's whatever A does."""
    import seqcomp

    a = seqcomp.parallelize(build(M0), plan=A)
    first_a = run(a, M0)
    b = seqcomp.parallelize(build(M0_MHA), plan=B)
    first_b = run(b, M0_MHA)
    same = {"between": equal(first_a, run(a, M0))}

    a.zero_grad(set_to_none=True)
    b.zero_grad(set_to_none=True)
    loss_a = a(**inputs(M0))["loss"]
    loss_b = b(**inputs(M0_MHA))["loss"]
    loss_a.backward()
    loss_b.backward()
    same["interleaved a"] = equal(first_a, (loss_a.detach(), gradients_of(a)))
    same["interleaved b"] = equal(first_b, (loss_b.detach(), gradients_of(b)))

    try:
        a(**inputs(M0, seq=15))
        same["refused"] = False
    except seqcomp.PlanError:
        same["refused"] = True
    same["b after a's error"] = equal(first_b, run(b, M0_MHA))

    seqcomp.of(b).close()
    other = seqcomp.parallelize(build(M0_MHA), plan=plans.ulysses(4))
    run(other, M0_MHA)
    same["a after b is closed"] = equal(first_a, run(a, M0))
    seqcomp.of(other).close()
    seqcomp.of(a).close()
    one = build(M0)
    same["restored"] = equal(run(one, M0), run(a, M0))
    return same


def equal(x: tuple[torch.Tensor, Any], y: tuple[torch.Tensor, Any]) -> bool:
    same_gradients = compare_grads(x[1], y[1])[0] == 0.0
    return torch.equal(x[0], y[0]) and same_gradients


@pytest.mark.distributed
def test_two_models_at_once(pools: Pools) -> None:
    for same in pools.run(4, two_models):
        assert all(same.values()), same
