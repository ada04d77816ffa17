"""Ways of writing a model: each computes what it computes on one device, or is refused by code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seqcomp.diagnostics import PlanError
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures.compare import CLEARLY_WRONG, compare_grads, gradients_of, value_distance
from tests.fixtures.idioms import IDIOMS, Block, Idiom

EXACT = [i for i in IDIOMS if i.refused is None]
REFUSED = [i for i in IDIOMS if i.refused is not None]


@dataclass(frozen=True)
class Outcome:
    """One device: output leaves, their structure, gradients of weights and of inputs by name."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    gradients: dict[str, Tensor | None]


def _model(idiom: Idiom) -> nn.Module:
    torch.manual_seed(7)
    return idiom.build().to(torch.float64).train(idiom.training)


def _weights(value: Tensor) -> Tensor:
    """Unequal weights for every element: a permuted or repeated token shows in the gradient."""
    count = torch.arange(value.numel(), dtype=value.dtype)
    return torch.cos(1.7 * count + 0.3).view(value.shape)


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _all_gradients(model: nn.Module, call: dict[str, Any]) -> dict[str, Tensor | None]:
    given = {
        f"input {name}": value.grad
        for name, value in call.items()
        if isinstance(value, Tensor) and value.requires_grad
    }
    return gradients_of(model) | given


def _one_device(idiom: Idiom) -> Outcome:
    model, call = _model(idiom), idiom.call()
    leaves, spec = pytree.tree_flatten(model(**call))
    sum((x * _weights(x)).sum() for x in leaves if _differentiable(x)).backward()
    return Outcome(leaves, spec, _all_gradients(model, call))


def test_an_operation_on_each_half_alone_would_be_seen() -> None:
    right = next(i for i in EXACT if i.name == "cumsum")
    halves = replace(
        right,
        build=lambda: Block(lambda x: torch.cat([part.cumsum(1) for part in x.chunk(2, 1)], 1)),
    )
    want, got = _one_device(right), _one_device(halves)
    assert value_distance(want.leaves[0], got.leaves[0]) > CLEARLY_WRONG
    assert compare_grads(want.gradients, got.gradients)[0] > CLEARLY_WRONG


@pytest.mark.parametrize("idiom", EXACT, ids=lambda idiom: idiom.name)
def test_outputs_and_every_gradient_are_those_of_one_device(idiom: Idiom) -> None:
    want = _one_device(idiom)
    resolved = resolve(load_plan(idiom.plan))
    batch = next(v.shape[0] for v in idiom.call().values())

    def own(value: Any, context: RankContext) -> Any:
        """This rank's slice of what covers the global batch."""
        carries = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == batch
        if not carries or resolved.data_axis is None:
            return value
        return value.chunk(resolved.data_size, 0)[context.coords[resolved.data_axis]]

    def step(model: nn.Module, context: RankContext, _: dict[str, Any]) -> tuple[float, float, str]:
        call = {
            name: own(value, context).detach().clone().requires_grad_(value.requires_grad)
            for name, value in idiom.call().items()
        }
        leaves, spec = pytree.tree_flatten(model(**call))
        assert spec == want.spec
        far = 0.0
        loss = torch.zeros((), dtype=torch.float64)
        for whole, leaf in zip(want.leaves, leaves, strict=True):
            expected = own(whole, context)
            if not isinstance(expected, Tensor):
                assert leaf == expected
                continue
            assert leaf.dtype == expected.dtype
            far = max(far, value_distance(expected, leaf))
            if _differentiable(whole):
                loss = loss + (leaf * own(_weights(whole), context)).sum()
        loss.backward()
        gradients = {name: None if g is None else g for name, g in want.gradients.items()}
        for name, gradient in gradients.items():
            if name.startswith("input "):
                gradients[name] = own(gradient, context)
        return (far, *compare_grads(gradients, _all_gradients(model, call)))

    ranks = lockstep(lambda: _model(idiom), idiom.plan, step)
    for rank, (far, gradient, worst) in enumerate(ranks):
        assert far <= 1, f"rank {rank}: output {far} tolerances away"
        assert gradient <= 1, f"rank {rank}: gradient of {worst} {gradient} tolerances away"


@pytest.mark.parametrize("idiom", REFUSED, ids=lambda idiom: idiom.name)
def test_what_cannot_be_exact_is_refused_by_code(idiom: Idiom) -> None:
    def step(model: nn.Module, context: RankContext, _: dict[str, Any]) -> list[str]:
        with pytest.raises(PlanError) as caught:
            model(**idiom.call())
        return [d.code for d in caught.value.diagnostics]

    for codes in lockstep(lambda: _model(idiom), idiom.plan, step):
        assert set(codes) == {idiom.refused}
