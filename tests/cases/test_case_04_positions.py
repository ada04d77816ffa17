"""Case 4: positions are global positions, in every style in which models make them."""

from __future__ import annotations

import pytest
import torch

from tests.fixtures import faults, plans
from tests.fixtures.compare import field_of, reference
from tests.fixtures.models import Spec, build, inputs
from tests.fixtures.parity import Call, Case, check_parity
from tests.fixtures.pool import Pools

STYLES = ("arange", "argument", "table", "complex", "learned")
PLANS = (
    plans.ring(2, "striped"),
    plans.ring(4, "contiguous"),
    plans.ring(4, "zigzag"),
    plans.ulysses(2),
)
# A second length on the same compiled module; buffers are compared after the calls.
CALLS = (Call({"seq": 16}), Call({"seq": 8}))


@pytest.mark.parametrize("degree", [2, 4])
def test_control_local_positions_are_seen(degree: int) -> None:
    spec = Spec(positions="argument")
    batch = inputs(spec)
    local = torch.arange(16) % (16 // degree)
    faulty = reference(lambda: build(spec), {**batch, "position_ids": local.repeat(2, 1)})
    faults.assert_shows(faults.single(spec), faulty)


def test_control_contiguous_positions_on_zigzag_tokens_are_seen() -> None:
    spec = Spec(positions="argument")
    permutation = torch.cat([torch.arange(16).chunk(4)[i] for i in (0, 3, 1, 2)])
    faulty_positions = torch.empty(16, dtype=torch.long)
    faulty_positions[permutation] = torch.arange(16)
    faulty = reference(
        lambda: build(spec), {**inputs(spec), "position_ids": faulty_positions.repeat(2, 1)}
    )
    faults.assert_shows(faults.single(spec), faulty)


@pytest.mark.parametrize("style", ["table", "arange", "argument"])
def test_the_styles_agree_on_one_process(style: str) -> None:
    spec = Spec(positions=style)
    out = build(spec)(**inputs(spec))
    loss = field_of(out, "loss")
    assert loss is not None
    want = faults.single(Spec()).loss
    assert want is not None
    torch.testing.assert_close(loss, want)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("style", "plan"),
    plans.in_turn(STYLES, PLANS),
    ids=lambda x: plans.name(x) if isinstance(x, dict) else x,
)
def test_positions(pools: Pools, style: str, plan: plans.Plan) -> None:
    check_parity(pools, Case(plan, Spec(positions=style), CALLS))


@pytest.mark.distributed
def test_positions_that_start_at_100(pools: Pools) -> None:
    calls = (Call({"first_position": 100}), Call({"first_position": 0}))
    check_parity(pools, Case(plans.ring(2, "zigzag"), Spec(positions="argument"), calls))
