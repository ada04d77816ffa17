"""torchtitan's models, unmodified, with the loss outside of them: gradients enter at the logits."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures.compare import (
    FP64_WITH_FP32_INSIDE,
    Reference,
    compare_grads,
    value_distance,
)
from tests.fixtures.families import needs_torchtitan, titan
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


def build(spec: str = "llama3/debugmodel") -> nn.Module:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        return titan(spec)


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
    ranks = lockstep(lambda: build(spec), {**loaded, **outputs}, step, inputs=batch())
    for rank, (logits, (gradient, worst), cuts) in enumerate(ranks):
        assert logits <= 1, rank
        assert gradient <= 1, (rank, worst)
        assert (cuts > 0) == ("megatron" in plan)
