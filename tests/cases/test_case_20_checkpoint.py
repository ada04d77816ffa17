"""Case 20: with activation checkpointing the backward ran another program than the forward.

Sources: huggingface/trl#4314, huggingface/transformers#35983 (the second run was local attention,
as backward was called outside of the context manager); pytorch/pytorch#152261 (selective).
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from seqcomp.runtime import recompute
from tests.fixtures import plans
from tests.fixtures.again import Step, Trained, differing, loss_of, trained, with_memory
from tests.fixtures.compare import FP64, compare_grads, reference
from tests.fixtures.models import build, inputs

aten = torch.ops.aten

PLANS = [plans.ring(4, "zigzag"), plans.ulysses(2), plans.megatron(2)]
# Collectives of the forward of one block, which runs again: attention, and what Megatron-SP does
# around it. Its gathers stand in for those that its backward makes without a checkpoint, and its
# last reduce-scatter has no values after it that the backward needs.
AGAIN = {
    "ring4-zigzag": {("p2p", "ring"): 3},
    "ulysses2": {("all_to_all", "ulysses"): 2},
    "tensor2": {("reduce_scatter", "tensor"): 1},
}
BLOCKS = 2


def check_same(found: list[Trained], want: list[Trained]) -> None:
    for rank, (one, other) in enumerate(zip(found, want, strict=True)):
        assert torch.equal(one.loss, other.loss), rank
        assert not differing(one, other), rank


def check_against_one_process(found: list[Trained]) -> None:
    want = reference(build, inputs())
    for one in found:
        assert compare_grads(want.gradients, one.gradients, FP64)[0] <= 1


def interleaved(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Two micro-batches forward before the first backward."""
    other = {name: value.flip(0) for name, value in batch.items()}
    return loss_of(model, batch) + loss_of(model, other)


def retained(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The backward twice over one graph."""
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    return loss


def no_grad(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return loss_of(model, batch)


def under_the_callers(
    model: nn.Module, batch: dict[str, Any], *, reentrant: bool = False, **options: Any
) -> Tensor:
    """The caller's own checkpoint around every block."""
    layers: Any = model.layers
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward, reentrant, options)
    try:
        return loss_of(model, batch)
    finally:
        for layer in layers:
            layer.forward = layer.forward.args[0]


def _recomputed(own: Any, reentrant: bool, options: dict[str, Any], *args: Any, **kw: Any) -> Any:
    return checkpoint(partial(own, **kw), *args, use_reentrant=reentrant, **options)


def keeping(*kept: Any) -> Any:
    return partial(create_selective_checkpoint_contexts, list(kept))


OURS: dict[str, Step] = {
    "step": loss_of,
    "interleaved": interleaved,
    "retained": retained,
    "no_grad": no_grad,
}
CALLERS: dict[str, Step] = {
    "own": under_the_callers,
    "reentrant": partial(under_the_callers, reentrant=True),
    "keeps_matmuls": partial(under_the_callers, context_fn=keeping(aten.mm.default)),
    "keeps_attention": partial(
        under_the_callers, context_fn=keeping(*sorted(recompute.KERNELS, key=str))
    ),
}
Steps = dict[str, list[Trained]]


@pytest.fixture(scope="module", params=PLANS, ids=plans.name)
def plan(request: pytest.FixtureRequest) -> plans.Plan:
    found: plans.Plan = request.param
    return found


@pytest.fixture(scope="module")
def plain(plan: plans.Plan) -> Steps:
    """Without `memory`: alone, and under the caller's checkpoints."""
    return trained(with_memory(plan), steps={**OURS, **CALLERS})


@pytest.fixture(scope="module")
def block(plan: plans.Plan) -> Steps:
    return trained(with_memory(plan, checkpoint="block"), steps=OURS)


@pytest.fixture(scope="module")
def selective(plan: plans.Plan) -> Steps:
    steps = {**OURS, "own": under_the_callers}
    return trained(with_memory(plan, checkpoint="selective"), steps=steps)


@pytest.mark.parametrize("name", OURS)
def test_the_second_run_is_the_first_again(
    plain: Steps, block: Steps, selective: Steps, name: str
) -> None:
    """Bit by bit, also where micro-batches interleave and where a graph is used twice."""
    check_same(block[name], plain[name])
    check_same(selective[name], plain[name])


def test_it_is_what_one_process_computes(block: Steps, selective: Steps) -> None:
    want = reference(build, inputs())
    for one in (*block["step"], *selective["step"]):
        assert compare_grads(want.gradients, one.gradients, FP64)[0] <= 1


def test_blocks_send_again_what_they_sent(plan: plans.Plan, plain: Steps, block: Steps) -> None:
    for one, other in zip(block["step"], plain["step"], strict=True):
        assert one.calls("forward") == other.calls("forward")
        again = {kind: BLOCKS * count for kind, count in AGAIN[plans.name(plan)].items()}
        assert one.calls("backward") == other.calls("backward") + Counter(again)


def test_what_is_dear_is_not_made_again(plain: Steps, selective: Steps) -> None:
    for one, other in zip(selective["step"], plain["step"], strict=True):
        assert one.traffic == other.traffic
        assert one.traffic


def test_without_gradients_nothing_runs_twice(block: Steps) -> None:
    assert all(one.calls("forward") and not one.calls("backward") for one in block["no_grad"])


@pytest.mark.parametrize("name", CALLERS)
def test_the_callers_own_checkpoints(plain: Steps, name: str) -> None:
    check_same(plain[name], plain["step"])


def test_both_at_once(plain: Steps, selective: Steps) -> None:
    """The caller's checkpoint around ours."""
    check_same(selective["own"], plain["step"])


def test_wrong_values_in_the_second_run_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: what was kept comes back wrong, and the gradients show it."""
    recall = recompute._Region.recall

    def wrong(self: Any) -> Any:
        return tuple(torch.zeros_like(x) for x in recall(self))

    def step(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        monkeypatch.setattr(recompute._Region, "recall", wrong)
        return loss_of(model, batch)

    found = trained(
        with_memory(PLANS[1], checkpoint="selective"), steps={"right": loss_of, "wrong": step}
    )
    with pytest.raises(AssertionError):
        check_same(found["wrong"], found["right"])
