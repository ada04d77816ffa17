"""Case 9: attention sinks count once, learn, and follow their heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from tests.fixtures import plans
from tests.fixtures.written_out import Written, ids

PLANS = [
    *(plans.ring(degree, layout) for degree in (2, 4) for layout in plans.LAYOUTS),
    plans.ring(2, "zigzag", "allgather"),
    plans.ulysses(2),
    plans.ulysses(4),
    plans.usp(2, 2, "zigzag"),
    plans.megatron(2),
    plans.with_tensor(plans.ring(2, "zigzag"), 2),
    plans.with_data(plans.ulysses(2), 2),
]


def objective(model: nn.Module) -> Tensor:
    hidden = model(**ids())["hidden"]
    generator = torch.Generator().manual_seed(5)
    return (hidden * torch.randn(hidden.shape, generator=generator, dtype=hidden.dtype)).sum()


def test_control_the_sinks_matter() -> None:
    """Ignoring the sinks, or counting them twice, is far beyond any tolerance."""
    model = Written("sinks")
    right = objective(model)
    right.backward()
    assert model.sinks.grad is not None
    assert model.sinks.grad.abs().min() > 1e-3
    with torch.no_grad():
        for wrong in (-40.0, torch.tensor(2.0).log().item()):
            other = Written("sinks")
            other.sinks.add_(wrong)
            assert abs(objective(other) - right) > 1e-3 * abs(right)


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_sinks(plan: plans.Plan) -> None:
    report = seqcomp.verify(lambda: Written("sinks"), plan, inputs_fn=ids)
    assert report.ok, str(report)
    assert not any("SC401" in text for text in report.findings)
