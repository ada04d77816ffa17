"""Every plan on M0: loss, full logits and every gradient on every rank, in fp64.

Each plan is compiled once and called with several batches and lengths.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.fixtures import plans
from tests.fixtures.models import (
    M0,
    M0_MHA,
    Decoder,
    Spec,
    default_dtype,
    initialise,
    inputs,
)
from tests.fixtures.parity import Call, Case, check_parity
from tests.fixtures.pool import Pools

TRANSPORTS = ("p2p", "allgather")
CALLS = tuple(Call({"batch": b, "seq": s}) for b, s in ((2, 16), (1, 32), (3, 8)))

# Every pair of degree, layout and transport, and of layout and order: the compiler's part of all of
# them is tested on ranks that are threads.
RINGS = [
    plans.ring(degree, layout, TRANSPORTS[(number + degree // 4) % 2])
    for number, layout in enumerate(plans.LAYOUTS)
    for degree in (2, 4)
]
USPS = [
    plans.usp(2, 2, layout, ring_outer=number != 1) for number, layout in enumerate(plans.LAYOUTS)
]


@pytest.mark.distributed
@pytest.mark.parametrize("plan", RINGS, ids=plans.name)
def test_ring(pools: Pools, plan: plans.Plan) -> None:
    check_parity(pools, Case(plan, M0, CALLS))


@pytest.mark.distributed
@pytest.mark.parametrize(("spec", "degree"), [(M0, 4), (M0_MHA, 2)], ids=["gqa-4", "mha-2"])
def test_ulysses(pools: Pools, spec: Spec, degree: int) -> None:
    """Degree 4 goes beyond the two KV heads of M0."""
    check_parity(pools, Case(plans.ulysses(degree), spec, CALLS))


@pytest.mark.distributed
@pytest.mark.parametrize("plan", USPS, ids=plans.name)
def test_usp_in_both_orders_of_the_mesh(pools: Pools, plan: plans.Plan) -> None:
    check_parity(pools, Case(plan, M0, CALLS))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "plan",
    [
        plans.with_data(plans.ring(2, "zigzag"), 2),
        plans.with_data(plans.ulysses(2), 2),
        {"mesh": {"data": 4}, "strategies": {"data": {}}},
    ],
    ids=plans.name,
)
def test_data(pools: Pools, plan: plans.Plan) -> None:
    calls = tuple(Call({"batch": b, "seq": s}) for b, s in ((4, 16), (8, 8)))
    check_parity(pools, Case(plan, M0, calls))


@pytest.mark.distributed
@pytest.mark.parametrize("plan", [plans.usp(2, 2, "zigzag"), plans.ulysses(2)], ids=plans.name)
def test_modes(pools: Pools, plan: plans.Plan) -> None:
    calls = (
        Call(mode="train"),
        Call(mode="eval"),
        Call(mode="no_grad"),
        Call(mode="inference"),
        Call({"with_labels": False}, mode="inference"),
        Call(objective="logits"),
        Call(mode="train"),
    )
    check_parity(pools, Case(plan, M0, calls))


@pytest.mark.distributed
def test_tied_weights_and_biases(pools: Pools) -> None:
    plan = plans.usp(2, 2, "zigzag")
    check_parity(pools, Case(plan, Spec(tied=True)))
    check_parity(pools, Case(plan, Spec(bias=True)))


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["usp_2x2", "data_2+ring_2"])
def test_presets(pools: Pools, name: str) -> None:
    check_parity(pools, Case(name, M0, (Call({"batch": 4}),)))


class Handwritten(Decoder):
    """Other names for the arguments; the labels are required."""

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(tokens, targets)


def build_handwritten(spec: Spec) -> nn.Module:
    with default_dtype(torch.float64):
        model = Handwritten(spec)
    initialise(model, spec.seed)
    return model


def handwritten_inputs(spec: Spec, **kwargs: int) -> dict[str, Tensor]:
    batch = inputs(spec, **kwargs)
    return {"tokens": batch["input_ids"], "targets": batch["labels"]}


@pytest.mark.distributed
def test_a_handwritten_module(pools: Pools) -> None:
    """Attention under the module's own import name, loss inside, arguments named differently."""
    spec = Spec(attention="renamed", positions="table", labels="shifted")
    for plan in (plans.usp(2, 2, "zigzag"), plans.ulysses(2)):
        case = Case(plan, spec, CALLS, build=build_handwritten, make_inputs=handwritten_inputs)
        check_parity(pools, case)


@pytest.mark.distributed
def test_plan_of_all_ones(pools: Pools) -> None:
    plan = {"mesh": {"ring": 1, "ulysses": 1}, "strategies": {"ring": {}, "ulysses": {}}}
    check_parity(pools, Case(plan, M0, CALLS))
