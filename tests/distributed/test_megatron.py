"""Megatron-SP on real ranks: every gradient of every rank equals one process."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.fixtures import plans
from tests.fixtures.families import build_family, family_inputs, tolerance_of
from tests.fixtures.models import M0, Spec
from tests.fixtures.parity import Call, Case, check_parity, check_parity_or_refused
from tests.fixtures.pool import Pools

EVEN = Spec(vocab=96, bias=True)
TIED = Spec(vocab=96, tied=True)
CALLS = (Call(), Call({"seq": 32, "batch": 4}), Call(mode="eval"), Call(mode="no_grad"))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("plan", "spec"),
    [
        (plans.megatron(2), EVEN),
        (plans.megatron(4), TIED),
        (plans.with_tensor(plans.ring(2, "zigzag"), 2), EVEN),
        (plans.with_tensor(plans.ring(2, "striped"), 2), TIED),
        (plans.with_tensor(plans.ulysses(2), 2), EVEN),
        (plans.with_data(plans.megatron(2), 2), TIED),
    ],
    ids=lambda x: plans.name(x) if isinstance(x, dict) else "tied" if x.tied else "even",
)
def test_parity(pools: Pools, plan: plans.Plan, spec: Spec) -> None:
    check_parity(pools, Case(plan, spec, CALLS[:2] if spec is TIED else CALLS))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("plan", "spec"),
    [
        (plans.megatron(4), Spec(vocab=97, tied=True)),
        (plans.megatron(4), Spec(vocab=5, kv_heads=4, head_bias=True)),
        (plans.with_tensor(plans.ring(2, "zigzag"), 2), M0),
    ],
    ids=["tied-97-over-4", "5-over-4", "97-over-2"],
)
def test_vocabulary_that_does_not_divide(pools: Pools, plan: plans.Plan, spec: Spec) -> None:
    check_parity(pools, Case(plan, spec))


def family_batch(family: str) -> dict[str, Tensor]:
    return family_inputs()


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["gpt2", "phi3", "gpt_neox"])
def test_weights_of_model_families(pools: Pools, family: str) -> None:
    """Conv1D, fused and interleaved weights."""
    case = Case(
        plans.megatron(2), family, build=build_family, make_inputs=family_batch,
        tolerance=tolerance_of(family),
    )  # fmt: skip
    check_parity(pools, case)


@pytest.mark.distributed
@pytest.mark.parametrize("seq", [12, 8, 6, 14])
def test_case_6_length_factor(pools: Pools, seq: int) -> None:
    plan = plans.with_tensor(plans.ring(2, "zigzag"), 2)
    exact = check_parity_or_refused(pools, Case(plan, EVEN, (Call({"seq": seq}),)), "4")
    assert exact == (seq % 4 == 0)
