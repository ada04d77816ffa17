"""`gradients: mean`: contributions of data ranks are averaged, what the model sums is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import compare_grads, field_of, gradients_of
from tests.fixtures.lockstep import whole_gradients
from tests.fixtures.models import M0, build, inputs


def mean(plan: plans.Plan) -> plans.Plan:
    return {**plan, "strategies": {**plan["strategies"], "data": {"gradients": "mean"}}}


def objective(model: nn.Module, batch: dict[str, Tensor], *, own: bool) -> Tensor:
    """The model's loss, or one that a user makes of the logits."""
    out = model(**batch)
    if not own:
        loss = field_of(out, "loss")
    else:
        logits = field_of(out, "logits")
        assert logits is not None
        loss = (logits * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)).tanh().mean()
    assert loss is not None
    return loss


PLANS = [
    plans.with_data(plans.ring(2, "zigzag"), 2),
    plans.with_data(plans.megatron(2), 2),
    {"mesh": {"data": 2}, "strategies": {"data": {}}},
]


@pytest.mark.parametrize("outputs", ["full", "sharded"])
@pytest.mark.parametrize("own", [False, True], ids=["loss of the model", "loss of the user"])
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_gradients_are_those_of_the_mean_over_data_ranks(
    plan: plans.Plan, own: bool, outputs: str
) -> None:
    """A user's mean over each rank's slice is averaged to the mean over the whole batch."""
    if outputs == "sharded" and own:
        pytest.skip("a mean over a shard is not the mean over the sequence")
    batch = inputs(M0, batch=4)
    model = build(M0)
    objective(model, batch, own=own).backward()
    want = gradients_of(model)

    def step(compiled: nn.Module, context: RankContext, local: dict[str, Any]) -> tuple[float, str]:
        objective(compiled, local, own=own).backward()
        return compare_grads(want, whole_gradients(compiled, context))

    given = {**mean(plan), "outputs": {"logits": outputs}}
    for distance, worst in lockstep(lambda: build(M0), given, step, inputs=batch):
        assert distance <= 1, worst


def test_by_default_contributions_add_up() -> None:
    """The same loss without `mean` has twice the gradient on two data ranks."""
    batch = inputs(M0, batch=4)
    model = build(M0)
    objective(model, batch, own=True).backward()
    want = gradients_of(model)

    def step(compiled: nn.Module, context: RankContext, local: dict[str, Any]) -> float:
        objective(compiled, local, own=True).backward()
        found = whole_gradients(compiled, context)
        return max(float((found[n] - 2 * g).abs().max() / g.abs().max()) for n, g in want.items())

    for distance in lockstep(lambda: build(M0), PLANS[0], step, inputs=batch):
        assert distance < 1e-10
