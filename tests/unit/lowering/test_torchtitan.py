"""torchtitan's models, unmodified, with the loss outside of them: gradients enter at the logits."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures.compare import (
    CLEARLY_WRONG,
    FP64_WITH_FP32_INSIDE,
    Reference,
    compare_grads,
    value_distance,
)
from tests.fixtures.exports import exported_once
from tests.fixtures.families import needs_torchtitan, titan, titan_documents, titan_flex
from tests.fixtures.flex import unfused
from tests.fixtures.lockstep import whole_gradients
from tests.fixtures.models import default_dtype
from tests.fixtures.parity import data_slice, slice_batch

pytestmark = needs_torchtitan
PLANS = (
    "ring_2", "ulysses_2", "usp_2x2", "megatron_sp_2", "megatron_sp_4", "ring_2+megatron_sp_2",
    "data_2+ring_2",
)  # fmt: skip
CASES = [("llama3/debugmodel", plan, mode) for plan in PLANS for mode in ("full", "sharded")] + [
    ("qwen3/debugmodel", "usp_2x2", "sharded"),
    ("qwen3/debugmodel", "ring_2+megatron_sp_2", "full"),
]
TOLERANCE = FP64_WITH_FP32_INSIDE


def build(spec: str = "llama3/debugmodel") -> Any:
    return copy.deepcopy(_first(titan, spec))


def build_flex(spec: str) -> Any:
    return copy.deepcopy(_first(titan_flex, spec))


@functools.cache
def _first(make: Callable[[str], nn.Module], spec: str) -> nn.Module:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        return make(spec)


def batch() -> dict[str, Tensor]:
    """tokens and next tokens [4, 16], the last of each document (and more) ignored."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 2048, (4, 16), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    labels[3, 5:] = -100
    return {"tokens": tokens, "labels": labels}


def loss_of(logits: Tensor, labels: Tensor, count: Tensor | int) -> Tensor:
    """As torchtitan's trainer: summed, over the global number of valid tokens."""
    from torchtitan.components.loss import cross_entropy_loss

    return cross_entropy_loss(logits, labels) / count


@functools.cache
def one_process(spec: str) -> Reference:
    labels = batch()["labels"]
    count = int((labels != -100).sum())
    model = build(spec)
    logits = model(batch()["tokens"])
    loss = loss_of(logits, labels, count)
    loss.backward()
    return Reference(
        loss.detach(), logits.detach(), {n: p.grad for n, p in model.named_parameters()}
    )


@pytest.mark.parametrize(("spec", "plan", "mode"), CASES)
def test_loss_outside(spec: str, plan: str, mode: str) -> None:
    want = one_process(spec)

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        labels = local["labels"]
        count = seqcomp.of(model).global_sum((labels != -100).sum())
        logits = model(local["tokens"])
        own = slice_batch(want.logits, *data_slice(plan, context.rank))
        if mode == "sharded":
            index = seqcomp.of(model).token_index()
            labels, own = labels[:, index], own[:, index]
            ranks = math.prod(n for axis, n in context.sizes.items() if axis != "data")
            assert logits.shape[1] == 16 // ranks
        loss_of(logits, labels, count).backward()
        return (
            value_distance(own, logits, TOLERANCE),
            compare_grads(want.gradients, whole_gradients(model, context), TOLERANCE),
            len(seqcomp.of(model).programs[-1].cuts),
        )

    outputs = {"outputs": {"output": mode}}
    loaded = seqcomp.load_plan(plan).model_dump(exclude_defaults=True)
    with exported_once(spec):
        ranks = lockstep(lambda: build(spec), {**loaded, **outputs}, step, inputs=batch())
    for rank, (logits, (gradient, worst), cuts) in enumerate(ranks):
        assert logits <= 1, rank
        assert gradient <= 1, (rank, worst)
        assert (cuts > 0) == ("megatron" in plan)


CALLS = {
    "positional": lambda tokens, positions: ((tokens, positions), {}),
    "for all samples": lambda tokens, positions: ((tokens,), {"positions": positions[1:]}),
    "by name": lambda tokens, positions: (
        (),
        {"attention_masks": None, "positions": positions, "tokens": tokens},
    ),
}


@pytest.mark.parametrize("style", CALLS)
@pytest.mark.parametrize("spec", ["llama3/debugmodel", "qwen3/debugmodel"])
def test_positions_passed_in(spec: str, style: str) -> None:
    """Looked up in the complex and the cos/sin table; documents in the second sample."""
    tokens = batch()["tokens"][:2]
    positions = torch.stack([torch.arange(3, 19), torch.tensor([*range(10), *range(6)])])
    args, kwargs = CALLS[style](tokens, positions)
    alone = build(spec)
    want = alone(*args, **kwargs)
    want.pow(2).sum().backward()
    gradients = {n: p.grad for n, p in alone.named_parameters()}
    # Control: other positions are another result.
    assert value_distance(want, alone(tokens), TOLERANCE) > CLEARLY_WRONG

    def step(model: nn.Module, context: RankContext, _: dict[str, Any]) -> Any:
        logits = model(*args, **kwargs)
        logits.pow(2).sum().backward()
        return (
            value_distance(want, logits, TOLERANCE),
            compare_grads(gradients, whole_gradients(model, context), TOLERANCE),
        )

    with exported_once(spec):
        ranks = lockstep(lambda: build(spec), "ring_2+megatron_sp_2", step)
    for logits, (gradient, worst) in ranks:
        assert logits <= 1
        assert gradient <= 1, worst


def test_lengths_and_checkpoints() -> None:
    """One program serves other lengths; keys and values of checkpoints are torchtitan's, whose
    hooks take the fused q, k, v apart; beyond the RoPE table the call is refused, as on one
    device."""
    alone = build()
    for layer in alone.layers.values():
        layer.attention.rope.cache = layer.attention.rope.cache[:64]
    wanted = {size: alone(batch()["tokens"].repeat(1, size // 16)) for size in (16, 64)}

    def step(model: Any, context: RankContext, _: dict[str, Any]) -> Any:
        far = [
            value_distance(want, model(batch()["tokens"].repeat(1, size // 16)), TOLERANCE)
            for size, want in wanted.items()
        ]
        with pytest.raises(seqcomp.PlanError) as refused:
            model(batch()["tokens"].repeat(1, 8))
        codes = [item.code for item in refused.value.diagnostics]
        state = model.state_dict()
        model.load_state_dict(state)
        return far, codes, len(seqcomp.of(model).programs), state

    for far, codes, programs, state in lockstep(lambda: copy.deepcopy(alone), "ring_2", step):
        assert max(far) <= 1
        assert codes == ["SC301"]
        assert programs == 1
        original = alone.state_dict()
        assert list(state) == list(original)
        assert "layers.0.attention.qkv_linear.wq.weight" in state
        assert all(torch.equal(state[name], value) for name, value in original.items())


@pytest.mark.parametrize("rows", [2, 1])  # torchtitan makes another mask for one row
@pytest.mark.parametrize("spec", ["llama3/debugmodel", "qwen3/debugmodel"])
def test_flex_attention_of_packed_documents(spec: str, rows: int) -> None:
    """torchtitan's own default, with the positions and the block mask that its trainer passes."""

    tokens = batch()["tokens"][:rows]
    packed = torch.tensor([[*range(10), *range(6)], [*range(3), *range(13)]])[:rows]
    call = titan_documents(packed)
    alone = build_flex(spec)
    with unfused():
        want = alone(tokens, **call)
        whole = alone(tokens, **titan_documents(torch.arange(16).expand(rows, -1)))
        want.pow(2).sum().backward()
    gradients = {n: p.grad for n, p in alone.named_parameters()}
    # Control: documents are another result.
    assert value_distance(want, whole, TOLERANCE) > CLEARLY_WRONG

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        logits = model(**local)
        logits.pow(2).sum().backward()
        return (
            value_distance(want, logits, TOLERANCE),
            compare_grads(gradients, whole_gradients(model, context), TOLERANCE),
        )

    # The weights are cut before the first call: its masks are not made up.
    given = {"inputs": {"tokens": tokens, **call}, "prepare": True, "timeout": 300}
    for logits, (gradient, worst) in lockstep(
        lambda: build_flex(spec), "ring_2+megatron_sp_2", step, **given
    ):
        assert logits <= 1
        assert gradient <= 1, worst
