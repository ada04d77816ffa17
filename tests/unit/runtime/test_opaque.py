"""Functions that torch.compile calls without looking: what they leave, and who learns."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seqcomp.runtime.opaque import Opaque
from tests.fixtures.traced import counted


def alike(x: Tensor, *_: Any, cast: Any) -> Any:
    return ((x.shape, x.dtype),)


def both(inputs: list[Tensor], *_: Any, cast: Any) -> Any:
    return [(x.shape, x.dtype) for x in inputs]


SINE = Opaque(lambda x, by: (x * by).sin(), "sine", alike)
TABLE = Opaque(lambda table, size: {"table": table, "size": size}, "table", None)
LOOKED_UP = Opaque(lambda x, held: x * held["table"] * held["size"], "looked up", alike)
PAIR = Opaque(lambda inputs, by: [inputs[0] * by, inputs[1] + 1], "pair", both, many=True)


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    return made[0].clone().requires_grad_(), made[1].clone().requires_grad_()


def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
    x, w = leaves()
    return list(torch.autograd.grad(function(x, w).sum(), (x, w)))


def test_what_is_learnt_through_an_object_arrives() -> None:
    def inside(x: Tensor, w: Tensor) -> Tensor:
        held = TABLE(w * 2, 3)
        return LOOKED_UP(LOOKED_UP(x, held), held)

    def outside(x: Tensor, w: Tensor) -> Tensor:
        held = TABLE(w * 2, 3)  # by who is not compiled
        return traced(lambda x: LOOKED_UP(LOOKED_UP(x, held), held))(x)

    def lists(x: Tensor, w: Tensor) -> Tensor:
        first, second = PAIR([x, w], 5)
        return first * second

    with counted() as found:
        for function in (inside, lists):
            assert all(map(torch.equal, gradients(function), gradients(traced(function))))
        assert all(map(torch.equal, gradients(inside), gradients(outside)))
    assert found.breaks == ()
    assert found.waiting() == 0


def test_a_backward_again_needs_a_retained_graph() -> None:
    with counted() as found:
        x, w = leaves()
        loss = traced(lambda x, w: SINE(x, w) * 2)(x, w).sum()
        first = torch.autograd.grad(loss, (x, w), retain_graph=True)
        assert found.waiting() == 1
        again = torch.autograd.grad(loss, (x, w))
        assert all(map(torch.equal, first, again))
        assert found.waiting() == 0  # though the loss is still there
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, (x, w))


def test_a_checkpoint_around_it_keeps_nothing() -> None:
    with counted() as found:
        x, w = leaves()
        loss = checkpoint(traced(lambda x, w: SINE(x, w) * 2), x, w, use_reentrant=False).sum()
        assert found.waiting() == 0
        got = torch.autograd.grad(loss, (x, w))
    assert all(map(torch.equal, got, gradients(lambda x, w: SINE(x, w) * 2)))


@pytest.mark.parametrize("learns", [True, False], ids=["backward", "dropped"])
def test_a_result_that_its_function_saves_goes_with_the_graph(learns: bool) -> None:
    results: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def run(x: Tensor, w: Tensor) -> Tensor:
        result = (x * w).exp()  # whose gradient is made of it
        results.add(result)
        return result

    grown = Opaque(run, "grown", alike)
    with counted():
        x, w = leaves()
        loss = traced(lambda x, w: grown(x, w) * 2)(x, w).sum()
        assert len(results) == 1
        if learns:
            torch.autograd.grad(loss, (x, w))
        del loss
        gc.collect()
        assert not results
