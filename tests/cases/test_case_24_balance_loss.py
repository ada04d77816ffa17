"""Case 24: balance losses of a mixture of experts are those of the whole batch.

The product of two means is not linear: statistics of a rank's own tokens give another loss.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import seqcomp
from tests.fixtures import plans
from tests.fixtures.experts import Balanced, balance, balanced, balanced_inputs

KINDS = ("batch", "sequence", "z")
PLANS = [
    *(plans.ring(2, layout) for layout in plans.LAYOUTS),
    plans.ring(4, "zigzag"),
    plans.ulysses(4),
    plans.usp(2, 2),
    plans.megatron(2),
    plans.with_tensor(plans.ring(2, "zigzag"), 2),
    plans.with_data(plans.ring(2), 2),
]
# Every layout under one of the losses, and every loss under plans of each kind.
CASES = [(plan, "batch") for plan in PLANS] + [
    (plan, kind)
    for kind in ("sequence", "z")
    for plan in (plans.ring(2, "zigzag"), plans.usp(2, 2), plans.with_tensor(plans.ring(2), 2))
]


class OfParts(Balanced):
    """The fault: the statistics of each half of the sequence, averaged."""

    @staticmethod
    def balance(kind: str, *tensors: Tensor) -> Tensor:
        parts = zip(*(x.chunk(2, 1) for x in tensors), strict=True)
        return torch.stack([balance(kind, *part) for part in parts]).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_control_local_statistics_give_another_loss(kind: str) -> None:
    right, wrong = balanced(kind), balanced(kind)
    wrong.__class__ = OfParts
    values, gradients = [], []
    for model in (right, wrong):
        aux = model(**balanced_inputs())["aux"]
        aux.backward()
        values.append(aux.item())
        gradients.append(model.gate.weight.grad)
    value = abs(values[0] - values[1]) / abs(values[0])
    gradient = (gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max()
    # Without a product of means only the padding is counted otherwise.
    assert value > (0.005 if kind == "z" else 0.05)
    assert gradient > (0.005 if kind == "z" else 0.2)


@pytest.mark.parametrize(
    ("plan", "kind"), CASES, ids=[f"{plans.name(plan)}-{kind}" for plan, kind in CASES]
)
def test_the_loss_and_the_router_are_those_of_the_whole(plan: plans.Plan, kind: str) -> None:
    report = seqcomp.verify(partial(balanced, kind), plan, inputs_fn=balanced_inputs)
    assert report.ok, str(report)
    assert 0 < report.max_grad_rel < 1e-12
    assert not any("SC401" in text for text in report.findings)
