"""Modules that run as one unit: exact under every strategy, on the tokens of a rank alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.diagnostics import PlanError
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.experts import SPEC, listed, routed
from tests.fixtures.models import build, default_dtype, inputs

PLANS = [
    plans.ring(2, "zigzag"),
    plans.ulysses(2),
    plans.usp(2, 2),
    plans.megatron(2),
    plans.with_tensor(plans.ring(2), 2),
    plans.with_data(plans.ring(2), 2),
]


def marked(plan: plans.Plan, match: str = "**.experts") -> plans.Plan:
    return {**plan, "overrides": [{"match": match, "token_local": True}]}


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_every_gradient_is_that_of_one_device(plan: plans.Plan) -> None:
    report = seqcomp.verify(routed, marked(plan), inputs_fn=lambda: inputs(SPEC))
    assert report.ok, str(report)
    assert 0 < report.max_grad_rel < 1e-12
    assert not any("SC401" in text for text in report.findings)
    assert any("SC405" in text and "mlp.experts" in text for text in report.findings) == (
        "tensor" in plan["mesh"]
    )


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_experts_without_a_token_on_some_rank(plan: plans.Plan) -> None:
    """The sums of gradients go on: a rank that met no token of an expert adds zeros."""
    report = seqcomp.verify(listed, marked(plan, "**.mlp"), inputs_fn=lambda: inputs(SPEC))
    assert report.ok, str(report)
    assert 0 < report.max_grad_rel < 1e-12


def test_control_ranks_meet_different_experts() -> None:
    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> set[int]:
        model(**local)  # compiles, which calls it on made-up tokens
        routing = model.get_submodule("layers.1.mlp")
        routing.met.clear()
        model(**local)["loss"].backward()
        assert all(p.grad is not None for p in model.parameters())
        return routing.met

    ranks = lockstep(listed, marked(plans.ring(4), "**.mlp"), step, inputs=inputs(SPEC))
    assert len({frozenset(met) for met in ranks}) > 1
    assert all(8 not in met for met in ranks)


@pytest.mark.parametrize("plan", [plans.usp(2, 2), plans.with_tensor(plans.ring(2), 2)])
def test_each_rank_runs_it_on_its_own_tokens(plan: plans.Plan) -> None:
    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        experts = model.get_submodule("layers.1.mlp.experts")
        model(**local)["loss"].backward()
        assert experts.up.grad.shape == experts.up.shape
        seqcomp.of(model).report()
        return experts.seen[-1]

    shapes = lockstep(routed, marked(plan), step, inputs=inputs(SPEC))
    ranks = math.prod(plan["mesh"].values())
    assert shapes == [(2 * 16 // ranks, SPEC.hidden)] * ranks


def test_without_the_mark_its_function_is_refused_with_the_mark_as_fix() -> None:
    with pytest.raises(PlanError) as error:
        seqcomp.verify(with_layer(Activation), plans.ring(2), inputs_fn=lambda: inputs(SPEC))
    (item,) = error.value.diagnostics
    assert item.code == "SC302"
    assert "{match: 'layers.1.mlp', token_local: true}" in str(item.help)


class Activation(nn.Module):
    """A custom autograd.Function alone, as BLOOM's activation."""

    def forward(self, x: Tensor) -> Tensor:
        from tests.fixtures.experts import Swish

        return Swish.apply(x)


class Mixing(nn.Module):
    """Says of itself that it treats each token alone, and does not."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Counting(nn.Module):
    """Returns a number of its own tokens beside them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, (x > 0).sum()


class Fixed(nn.Module):
    """A table that fixes the length, in front of an activation with sizes that are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(16, SPEC.hidden))
        self.inner = Activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.table)


class First(nn.Module):
    """Takes what `inner` returns first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Pooled(nn.Module):
    """Hands the mean over tokens to `inner`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Activation()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.mean(1))[:, None]


def with_layer(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        with default_dtype(torch.float64):
            made = build(SPEC)
            made.layers[1].mlp = make()
        return made

    return model


def test_a_module_that_mixes_tokens_is_caught() -> None:
    plan = marked(plans.ring(2), "layers.1.mlp")
    report = seqcomp.verify(with_layer(Mixing), plan, inputs_fn=lambda: inputs(SPEC))
    assert not report.ok
    assert report.max_grad_rel > 1e-3
    assert "layers.1.mlp" in str(report.first_divergence)


@pytest.mark.parametrize(
    ("make", "match", "found"),
    [
        (lambda: First(Counting()), "**.inner", "result 1"),
        (Pooled, "**.inner", "no argument"),
    ],
    ids=["result", "argument"],
)
def test_what_has_no_tokens_is_refused(
    make: Callable[[], nn.Module], match: str, found: str
) -> None:
    with pytest.raises(PlanError) as error:
        seqcomp.verify(
            with_layer(make), marked(plans.ring(2), match), inputs_fn=lambda: inputs(SPEC)
        )
    (item,) = error.value.diagnostics
    assert item.code == "SC314"
    assert found in str(item.found)
    assert item.help


def test_sizes_that_are_numbers_are_tried_with_those_of_a_rank() -> None:
    plan = marked(plans.ring(2), "**.inner")
    report = seqcomp.verify(with_layer(Fixed), plan, inputs_fn=lambda: inputs(SPEC))
    assert report.ok, str(report)
