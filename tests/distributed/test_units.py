"""Modules that run as one unit, on real ranks: weights are DTensors under Megatron-SP."""

from __future__ import annotations

import pytest
from torch import nn

from tests.fixtures import plans
from tests.fixtures.experts import SPEC, listed, routed
from tests.fixtures.models import Spec
from tests.fixtures.parity import Call, Case, check_parity
from tests.fixtures.pool import Pools

MARK = {"overrides": [{"match": "**.experts", "token_local": True}]}
CALLS = (Call(), Call({"seq": 32, "batch": 4}), Call(mode="no_grad"))


def build(spec: Spec) -> nn.Module:
    return routed(spec)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "plan",
    [plans.usp(2, 2, "zigzag"), plans.with_tensor(plans.ring(2, "zigzag"), 2)],
    ids=plans.name,
)
def test_parity(pools: Pools, plan: plans.Plan) -> None:
    check_parity(pools, Case({**plan, **MARK}, SPEC, CALLS, build=build))


def build_listed(spec: Spec) -> nn.Module:
    model = listed(spec)
    model.layers[1].mlp.each = model.layers[1].mlp.each[:-1]  # no expert that has no token at all
    return model


@pytest.mark.distributed
def test_experts_that_only_some_ranks_meet(pools: Pools) -> None:
    plan = {**plans.usp(2, 2), "overrides": [{"match": "**.mlp", "token_local": True}]}
    check_parity(pools, Case(plan, SPEC, (Call({"batch": 4}),), build=build_listed))
