"""Gradients of replicated parameters: complete whatever asks for them, in a bounded number of sums.

Every case compares the gradients of every rank with those of one process on the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqcomp.lowering import gradients
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import FP64, compare_grads, gradients_of
from tests.fixtures.lockstep import whole_gradients
from tests.fixtures.models import Spec, build, inputs

SPEC = Spec(tied=True, bias=True, vocab=96)
PLANS = [
    plans.usp(2, 2, "zigzag"),
    plans.with_tensor(plans.ring(2, "zigzag"), 2),
    plans.with_data(plans.ring(2, "zigzag"), 2),
]
Step = Callable[[nn.Module, dict[str, Any]], Any]


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


def backward(model: nn.Module, batch: dict[str, Any]) -> None:
    loss_of(model, batch).backward()


def accumulated(model: nn.Module, batch: dict[str, Any]) -> None:
    for _ in range(3):
        backward(model, batch)


def forwards_before_backwards(model: nn.Module, batch: dict[str, Any]) -> None:
    first, second = loss_of(model, batch), loss_of(model, batch)
    (first * 2 + second).backward()


def retained(model: nn.Module, batch: dict[str, Any]) -> None:
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    loss.backward()


def asked_for(model: nn.Module, batch: dict[str, Any]) -> None:
    """`autograd.grad` of some parameters leaves the others alone."""
    some = [model.layers[0].n2.weight, model.emb.weight, model.layers[1].mlp.up.weight]
    for parameter, gradient in zip(
        some, torch.autograd.grad(loss_of(model, batch), some), strict=True
    ):
        parameter.grad = gradient


def hooked(model: nn.Module, batch: dict[str, Any]) -> None:
    """Hooks see whole gradients: what they make of them is not linear."""
    for parameter in model.parameters():
        parameter.register_hook(torch.square)
    seen: list[Tensor] = []
    weight = model.layers[0].n1.weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    backward(model, batch)
    assert torch.equal(seen[0], weight.grad)


def frozen(model: nn.Module, batch: dict[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("n2" in name or "layers.1.mlp" in name)
    backward(model, batch)


def unfrozen(model: nn.Module, batch: dict[str, Any]) -> None:
    model.layers.requires_grad_(False)
    backward(model, batch)
    model.zero_grad()
    model.layers.requires_grad_(True)
    backward(model, batch)


def checkpointed(model: nn.Module, batch: dict[str, Any], reentrant: bool) -> None:
    for layer in model.layers:
        own = layer.forward
        layer.forward = partial(_recomputed, own, reentrant)  # type: ignore[method-assign]
    backward(model, batch)


def _recomputed(own: Any, reentrant: bool, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(own, **kwargs), *args, use_reentrant=reentrant)


STEPS: dict[str, Step] = {
    "backward": backward,
    "accumulated": accumulated,
    "forwards_before_backwards": forwards_before_backwards,
    "retained": retained,
    "asked_for": asked_for,
    "hooked": hooked,
    "frozen": frozen,
    "unfrozen": unfrozen,
    "checkpointed": partial(checkpointed, reentrant=False),
    "checkpointed_reentrant": partial(checkpointed, reentrant=True),
}


# On threads a cut parameter is a plain tensor: a hook that is not linear sees a part of the
# gradient there.
CASES = [(n, p) for n in STEPS for p in PLANS if (n, p) != ("hooked", PLANS[1])]


def errors(step: Step, plan: plans.Plan) -> list[tuple[float, str]]:
    plain = build(SPEC)
    step(plain, inputs(SPEC))
    want = gradients_of(plain)

    def on_rank(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        loss_of(model, local)
        step(model, local)
        return compare_grads(want, whole_gradients(model, context), FP64)

    return lockstep(lambda: build(SPEC), plan, on_rank, inputs=inputs(SPEC))


@pytest.mark.parametrize(("name", "plan"), CASES, ids=[f"{n}-{plans.name(p)}" for n, p in CASES])
def test_gradients_are_complete(
    name: str, plan: plans.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With buckets that end inside of layers."""
    monkeypatch.setattr(gradients, "_FIRST_BUCKET", 2_000)
    monkeypatch.setattr(gradients, "_BUCKET", 20_000)
    for distance, worst in errors(STEPS[name], plan):
        assert distance <= 1, worst


def sums(layers: int, plan: plans.Plan) -> list[tuple[int, int]]:
    """(calls, bytes) of gradients of each rank in one step."""
    spec = Spec(tied=True, layers=layers, causal=(True,) * layers, vocab=96)

    def on_rank(model: nn.Module, context: RankContext, local: dict[str, Any]) -> tuple[int, int]:
        context.traffic.reset()
        backward(model, local)
        rows = [row for row in context.traffic.rows() if row.label == "gradients"]
        assert not any(row.label.endswith(("weight", "bias")) for row in context.traffic.rows())
        return sum(row.count for row in rows), sum(row.bytes_sent for row in rows)

    return lockstep(lambda: build(spec), plan, on_rank, inputs=inputs(spec))


@pytest.mark.parametrize("layers", [1, 6])
def test_one_sum_serves_all_layers(layers: int) -> None:
    """A tied weight goes round once: the bytes are those of the parameters."""
    spec = Spec(tied=True, layers=layers, causal=(True,) * layers, vocab=96)
    numbers = sum(p.numel() for p in build(spec).parameters())
    for calls, sent in sums(layers, plans.usp(2, 2, "zigzag")):
        assert (calls, sent) == (1, 2 * 3 * numbers * 8 // 4)


def test_norm_weights_of_all_layers_go_together() -> None:
    assert [calls for calls, _ in sums(6, plans.megatron(2))] == [1, 1]


def test_buckets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as bytes fill, a little more where parameters do not fit evenly; none is torn."""
    monkeypatch.setattr(gradients, "_FIRST_BUCKET", 10_000)
    monkeypatch.setattr(gradients, "_BUCKET", 100_000)
    spec = Spec(tied=True, layers=6, causal=(True,) * 6, vocab=96)
    total = sum(p.numel() * 8 for p in build(spec).parameters())
    for calls, sent in sums(6, plans.usp(2, 2, "zigzag")):
        assert sent == 2 * 3 * total // 4
        assert total / 100_000 < calls <= 2 * total / 100_000 + 2


def test_sums_start_while_earlier_layers_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def on_rank(model: nn.Module, context: RankContext, local: dict[str, Any]) -> None:
        loss_of(model, local)
        loss = loss_of(model, local)
        if context.rank == 0:
            own = context.traffic.add

            def noted(kind: str, *rest: Any) -> None:
                order.append(str(rest[-1]))
                own(kind, *rest)

            context.traffic.add = noted  # type: ignore[method-assign]
        loss.backward()

    monkeypatch.setattr(gradients, "_FIRST_BUCKET", 2_000)
    monkeypatch.setattr(gradients, "_BUCKET", 20_000)
    lockstep(lambda: build(SPEC), plans.usp(2, 2, "zigzag"), on_rank, inputs=inputs(SPEC))
    assert order.index("gradients") < order.index("layers.0.attn")
    assert order[-1] == "gradients"
