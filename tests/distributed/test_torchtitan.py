"""torchtitan's debug Llama on real ranks: its loss inside a wrapper, and outside of it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.fixtures import plans
from tests.fixtures.compare import FP64_WITH_FP32_INSIDE
from tests.fixtures.families import build_family, family_inputs, needs_torchtitan
from tests.fixtures.parity import Call, Case, check_parity
from tests.fixtures.pool import Pools

pytestmark = [pytest.mark.distributed, needs_torchtitan]


def build(family: str) -> nn.Module:
    return build_family(family)


def make_inputs(family: str, *, seq: int = 16, labels: bool = True) -> dict[str, Any]:
    batch = family_inputs(length=seq)
    return batch if labels else {"input_ids": batch["input_ids"]}


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("titan_llama3", plans.usp(2, 2, "zigzag")),
        ("titan_llama3", plans.megatron(2)),
        ("titan_llama3", plans.with_data(plans.ring(2, "zigzag"), 2)),
        ("titan_qwen3", plans.ring(2, "zigzag")),
    ],
    ids=lambda value: value if isinstance(value, str) else plans.name(value),
)
def test_real_ranks(pools: Pools, family: str, plan: plans.Plan) -> None:
    calls = (Call(), Call({"labels": False}, objective="logits"), Call({"seq": 32}, "no_grad"))
    case = Case(plan, family, calls, build, make_inputs, FP64_WITH_FP32_INSIDE)
    check_parity(pools, case)
