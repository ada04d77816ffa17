"""FlexAttention under every way of dividing the sequence, against torch's own on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask

import seqcomp
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import (
    CLEARLY_WRONG,
    FP64,
    FP64_WITH_FP32_INSIDE,
    Tolerance,
    compare_grads,
    reference,
    value_distance,
)
from tests.fixtures.flex import (
    GENERAL,
    MASKS,
    SCORES,
    build_flex,
    causal,
    flex_inputs,
    same,
    unfused,
)
from tests.fixtures.lockstep import whole_gradients
from tests.fixtures.masked_parity import on_ranks
from tests.fixtures.plans import Plan
from tests.zoo.entry import GROUPED, hf, labelled, packed, padded

ALL: tuple[Plan, ...] = (
    plans.ring(2, "contiguous"),
    plans.ring(2, "zigzag"),
    plans.ring(3, "striped"),
    plans.ulysses(2),
    plans.usp(2, 2, "zigzag"),
    plans.megatron(2),
    plans.with_data(plans.ring(2, "striped"), 2),
)


def run(
    make: Callable[[], nn.Module],
    plan: Plan,
    batch: dict[str, Any],
    tolerance: Tolerance = FP64,
) -> tuple[float, str]:
    """The largest distance of loss, logits and gradients of all ranks, and where it is."""
    with unfused():
        want = reference(make, batch)
    return on_ranks(make, plan, batch, want, tolerance)


@pytest.mark.parametrize("plan", ALL, ids=plans.name)
def test_masks_and_biases(plan: Plan) -> None:
    distance, worst = run(build_flex(MASKS, SCORES), plan, flex_inputs())
    assert distance <= 1, worst


@pytest.mark.parametrize("plan", ALL[::2], ids=plans.name)
def test_mods_without_a_name_and_log_sum_exps(plan: Plan) -> None:
    """Sinks are applied by the log-sum-exp, whose gradient goes on to q, k and the mods."""
    masks = {name: MASKS[name] for name in ("causal", "documents", "per_head")}
    scores = {**GENERAL, **{name: SCORES[name] for name in ("capped", "sum")}}
    distance, worst = run(build_flex(masks, scores, sinks=True), plan, flex_inputs())
    assert distance <= 1, worst


def block_mask(segments: Tensor) -> BlockMask:
    mod = and_masks(causal, same(segments))
    rows = segments.shape[1]
    return create_block_mask(mod, len(segments), None, rows, rows, device="cpu")


@pytest.mark.parametrize("plan", [ALL[1], ALL[4]], ids=plans.name)
def test_block_masks_of_the_caller_change_from_call_to_call(plan: Plan) -> None:
    batch, make = flex_inputs(), build_flex(bare=True)
    numbers = [batch["segments"], torch.arange(96).div(20, rounding_mode="floor").expand(2, -1)]
    calls = [{**batch, "block_mask": block_mask(n)} for n in numbers]
    with unfused():
        wanted = [reference(make, call) for call in calls]
    assert value_distance(wanted[0].logits, wanted[1].logits) > CLEARLY_WRONG

    def step(model: nn.Module, context: RankContext, _: dict[str, Any]) -> Any:
        found = []
        for call, want in zip(calls, wanted, strict=True):
            model.zero_grad()
            out = model(**call)
            out["loss"].backward()
            found.append(compare_grads(want.gradients, whole_gradients(model, context))[0])
            found.append(value_distance(want.logits, out["logits"]))
        return max(found), len(seqcomp.of(model).programs)

    for distance, programs in lockstep(make, plan, step, timeout=300):
        assert distance <= 1
        assert programs == 1


def test_a_token_of_one_document_moves_no_logit_of_another() -> None:
    make, probe = build_flex({"one": MASKS["documents"], "two": MASKS["by_row"]}), 2

    def step(model: nn.Module, context: RankContext, _: dict[str, Any]) -> Any:
        before, after = (model(**flex_inputs(probe=at))["logits"] for at in (None, probe))
        return (before - after).detach().abs().amax(-1)

    segments = flex_inputs()["segments"]
    for moved in lockstep(make, plans.ring(2, "zigzag"), step, timeout=300):
        for row, numbers in zip(moved, segments, strict=True):
            own = numbers == numbers[probe]
            assert not row[~own].any()
            assert row[own][probe:].min() > 1e-4, "the probe shows nothing"


def test_a_block_mask_of_another_length_is_refused() -> None:
    batch = {**flex_inputs(), "block_mask": block_mask(torch.zeros(2, 48, dtype=torch.long))}

    def step(model: nn.Module, context: RankContext, _: dict[str, Any]) -> None:
        model(**batch)

    with pytest.raises(seqcomp.PlanError, match="48 queries"):
        lockstep(build_flex(bare=True), plans.ring(2), step, timeout=300)


@pytest.mark.parametrize(
    ("architecture", "more", "batch"),
    [
        ("LlamaForCausalLM", {}, padded()),
        ("LlamaForCausalLM", {}, {**packed(), "use_cache": False}),
        ("MistralForCausalLM", {"sliding_window": 7}, labelled()),
    ],
)
def test_transformers(architecture: str, more: dict[str, Any], batch: dict[str, Any]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return hf(architecture, "flex_attention", **GROUPED, **more)().double()

    distance, worst = run(make, plans.ring(2, "zigzag"), batch, FP64_WITH_FP32_INSIDE)
    assert distance <= 1, worst
