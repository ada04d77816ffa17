"""Case 10: padding; rows and blocks that see nothing give no NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import (
    CLEARLY_WRONG,
    FP64,
    Tolerance,
    compare_grads,
    reference,
    value_distance,
)
from tests.fixtures.documents import build_kind, padded
from tests.fixtures.lockstep import whole_gradients
from tests.fixtures.parity import Call, Case, check_parity
from tests.fixtures.plans import Plan
from tests.fixtures.pool import Pools

PADDING: dict[str, dict[str, int]] = {
    "left": {"left": 6},
    "right": {"left": 0, "right": 5},
    "both": {"left": 3, "right": 4},
    "a whole row": {"left": 16},
}
PLANS: tuple[Plan, ...] = (*(plans.ring(4, layout) for layout in plans.LAYOUTS), plans.ulysses(2))


def test_control_padding_that_is_ignored_is_seen() -> None:
    right = reference(lambda: build_kind("padding"), padded("padding"))
    ignored = reference(lambda: build_kind("causal"), padded("padding"))
    assert compare_grads(right.gradients, ignored.gradients, FP64)[0] > CLEARLY_WRONG


def distance(kind: str, plan: Plan, dtype: torch.dtype, tolerance: Tolerance, **pad: int) -> float:
    """Of logits, padded rows included, and of gradients; NaN is infinitely far."""
    batch = padded(kind, **pad)
    want = reference(lambda: build_kind(kind, dtype), batch)
    assert want.logits is not None
    assert not want.logits.isnan().any()

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> float:
        out = model(**local)
        out["loss"].backward()
        found = whole_gradients(model, context)
        assert all(g is None or bool(g.isfinite().all()) for g in found.values())
        gradient, _ = compare_grads(want.gradients, found, tolerance)
        return max(gradient, value_distance(want.logits, out["logits"], tolerance))

    return max(lockstep(lambda: build_kind(kind, dtype), plan, step, inputs=batch, prepare=True))


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
@pytest.mark.parametrize("pad", PADDING)
def test_padding_equals_one_device(pad: str, plan: Plan) -> None:
    assert distance("padding", plan, torch.float64, FP64, **PADDING[pad]) <= 1


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_padding_in_a_mask_of_the_caller(kind: str) -> None:
    assert distance(kind, PLANS[2], torch.float64, FP64, left=6) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan", PLANS[:3], ids=plans.name)
def test_padding_in_narrow_dtypes(plan: Plan, dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    tolerance = Tolerance(value=10 * step, relative=30 * step, floor=30 * step)
    assert distance("padding", plan, dtype, tolerance, left=6) <= 1


@pytest.mark.distributed
@pytest.mark.parametrize("plan", [plans.ring(4, "contiguous"), plans.ring(2, "zigzag")],
                         ids=plans.name)  # fmt: skip
def test_padding_on_real_ranks(pools: Pools, plan: Plan) -> None:
    calls = (Call({"left": 6}), Call({"left": 0, "right": 5}), Call({"left": 12}))
    check_parity(pools, Case(plan, "padding", calls, build=build_kind, make_inputs=padded))
