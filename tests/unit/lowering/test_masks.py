"""Masks of any kind: what one device computes, under every way of dividing the sequence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import seqcomp
from seqcomp.diagnostics import PlanError
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import CLEARLY_WRONG, FP64_WITH_FP32_INSIDE, Tolerance
from tests.fixtures.masked import (
    BIASES,
    DENSE,
    FLAT,
    ROUNDED,
    STRUCTURED,
    MaskFn,
    build_masked,
    causal,
    masked_inputs,
    places,
)
from tests.fixtures.masked_parity import run
from tests.fixtures.plans import Plan

EXACT = {name: mask for name, mask in BIASES.items() if name not in ROUNDED}
ALL: tuple[Plan, ...] = (
    plans.ring(2, "contiguous"),
    plans.ring(2, "zigzag", "allgather"),
    plans.ring(3, "striped"),
    plans.ring(4, "zigzag"),
    plans.ulysses(2),
    plans.ulysses(4),
    plans.usp(2, 2, "striped"),
    plans.megatron(2),
    plans.with_tensor(plans.ring(2, "zigzag"), 2),
    plans.with_data(plans.ring(2, "striped"), 2),
)
FEW = (ALL[2], ALL[5], ALL[6], ALL[8])


@pytest.mark.parametrize("plan", ALL, ids=plans.name)
def test_masks_with_structure(plan: Plan) -> None:
    distance, worst = run(STRUCTURED, plan)
    assert distance <= 1, worst


@pytest.mark.parametrize("plan", FEW, ids=plans.name)
def test_biases_and_rows_that_numbers_hide(plan: Plan) -> None:
    """The labels of padded tokens count: their rows have gradients too."""
    distance, worst = run(EXACT, plan, ignored=False)
    assert distance <= 1, worst


def test_what_one_device_rounds_is_not_worse() -> None:
    masks = {name: BIASES[name] for name in ROUNDED}
    distance, worst = run(masks, ALL[2], tolerance=FP64_WITH_FP32_INSIDE)
    assert distance <= 1, worst


@pytest.mark.parametrize("plan", [ALL[3], ALL[6], ALL[8]], ids=plans.name)
def test_dense_masks_are_data(plan: Plan) -> None:
    distance, worst = run(DENSE, plan, dense=True, ignored=False)
    assert distance <= 1, worst


@pytest.mark.parametrize("plan", [ALL[0], ALL[3], ALL[6]], ids=plans.name)
def test_documents_by_their_ends(plan: Plan) -> None:
    distance, worst = run(FLAT, plan, flat=True)
    assert distance <= 1, worst


def test_a_row_of_padding_alone() -> None:
    masks = {name: {**STRUCTURED, **BIASES}[name] for name in ("causal_and_padding", "padding",
             "added_padding", "min", "min_plus_min", "minus_10000")}  # fmt: skip
    distance, worst = run(masks, plans.ring(4, "zigzag"), right=96, ignored=False)
    assert distance <= 1, worst


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [(ALL[2], torch.bfloat16), (ALL[6], torch.float32)],
    ids=lambda x: plans.name(x) if isinstance(x, dict) else str(x),
)
def test_narrow_dtypes_give_no_nan(plan: Plan, dtype: torch.dtype) -> None:
    # Distances are those of rounding, not of a fault; NaN would be infinitely far.
    step = torch.finfo(dtype).eps
    tolerance = Tolerance(value=30 * step, relative=60 * step, floor=60 * step)
    masks = {**STRUCTURED, **EXACT}
    del masks["min_of_float32"]  # torch refuses it in bfloat16
    distance, worst = run(masks, plan, dtype=dtype, tolerance=tolerance, ignored=False)
    assert math.isfinite(distance)
    assert distance <= 1, worst


CONTROLS: dict[str, tuple[MaskFn, MaskFn]] = {
    "documents ignored": (STRUCTURED["documents"], lambda m, q, g: causal(q)),
    "padding ignored": (STRUCTURED["causal_and_padding"], lambda m, q, g: causal(q)),
    "window one wider": (
        STRUCTURED["window"], lambda m, q, g: causal(q) & (places(q)[0] - places(q)[1] < 12)),
    "slopes of other heads": (
        BIASES["alibi_of_keys"], lambda m, q, g: BIASES["alibi_of_keys"](m, q.flip(1), g).flip(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTROLS)
def test_positive_control_another_mask_is_seen(name: str) -> None:
    right, wrong = CONTROLS[name]
    calls = 0

    def first_right(m: Any, q: Any, g: Any) -> Any:
        nonlocal calls
        calls += 1  # the reference comes first
        return (right if calls == 1 else wrong)(m, q, g)

    assert run({"x": first_right}, plans.ring(2, "zigzag"))[0] > CLEARLY_WRONG


def _codes(masks: dict[str, MaskFn], **shape: Any) -> dict[str, list[str]]:
    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> dict[str, list[str]]:
        model(**local)
        report = seqcomp.of(model).report()
        assert len(report.kernels) == len(masks)
        codes: dict[str, list[str]] = {name: [] for name in masks}
        for finding in report.findings:
            if finding.where.startswith("branches."):
                codes[finding.where.split(":")[0].split(".")[1]].append(finding.code)
        return codes

    plan = plans.ring(2, "zigzag")
    return lockstep(build_masked(masks), plan, step, inputs=masked_inputs(**shape), prepare=True)[0]


def test_what_has_structure_is_never_a_square() -> None:
    masks = {**STRUCTURED, **BIASES, **FLAT}
    assert _codes(masks, flat=True) == {name: [] for name in masks}


def test_squares_are_reported() -> None:
    assert _codes(DENSE, dense=True) == {name: ["SC407"] for name in DENSE}


OF_ACTIVATIONS: dict[str, MaskFn] = {
    "of_keys": lambda m, q, g: causal(q) & (q[:, 0, :, 0] > -1)[:, None, None, :],
    "keys_of_heads": lambda m, q, g: causal(q) & (q[..., 0] > -0.5)[:, :, None, :],
    "of_pairs": lambda m, q, g: causal(q) & (
        (q[:, 0, :, 0] > 0).cumsum(1)[:, None, None]
        == (q[:, 0, :, 0] > 0).cumsum(1)[:, None, :, None]),
    "detached_bias": lambda m, q, g: q.detach()[:, :1, :, :1].mT + places(q)[0].to(q.dtype) * 0,
}  # fmt: skip


@pytest.mark.parametrize("plan", FEW, ids=plans.name)
def test_masks_of_values_without_gradient(plan: Plan) -> None:
    distance, worst = run(OF_ACTIVATIONS, plan)
    assert distance <= 1, worst


@pytest.mark.parametrize("plan", FEW, ids=plans.name)
def test_biases_of_activations_pass_their_gradient_on(plan: Plan) -> None:
    mask = {"learned": lambda m, q, g: q[:, :1, :, :1].mT + places(q)[0].to(q.dtype) * 0}
    distance, worst = run(mask, plan)
    assert distance <= 1, worst


REFUSED: dict[str, tuple[MaskFn, str]] = {
    "random": (lambda m, q, g: torch.rand(q.shape[2], q.shape[2]) > 0.2, "SC308"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_another_mask_for_each_tile_is_refused(name: str) -> None:
    mask, code = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        run({"x": mask}, plans.ring(2, "zigzag"))
    assert caught.value.diagnostics[0].code == code
