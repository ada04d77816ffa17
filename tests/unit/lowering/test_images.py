"""Sequences that a model makes itself: the patches of an image, with and without class tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqcomp
from seqcomp.diagnostics import PlanError
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import FP64, compare_grads, reference, value_distance
from tests.fixtures.lockstep import counted, reported, whole_gradients
from tests.fixtures.models import default_dtype, initialise
from tests.fixtures.work import work_of

WIDTH, HEADS, PATCH, BATCH, CHANNELS = 24, 4, 4, 2, 3
ALONE: plans.Plan = {"mesh": {"ring": 1}, "strategies": {"ring": {}}}
PLANS = [
    plans.ring(2, "contiguous"),
    plans.ulysses(4),
    plans.usp(2, 2),
    plans.megatron(2),
    plans.with_tensor(plans.ring(2, "contiguous"), 2),
]


class Vision(nn.Module):
    """patch convolution, [class tokens], positions, two blocks, mean over tokens -> loss."""

    def __init__(self, classes: int = 0, side: int = 4, window: int = 0) -> None:
        super().__init__()
        self.window = window
        self.patch = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        self.classes = nn.Parameter(torch.zeros(1, classes, WIDTH)) if classes else None
        self.position = nn.Parameter(torch.zeros(1, classes + side * side, WIDTH))
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        x = self.patch(pixel_values).flatten(2).transpose(1, 2)
        if self.classes is not None:
            x = torch.cat([self.classes.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.position
        if self.window:
            x = x.reshape(-1, self.window, WIDTH)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": logits.square().mean(), "logits": logits}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm1(x)
        q, k, v = (
            f(n).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make(**settings: int) -> nn.Module:
    with default_dtype(torch.float64):
        model = Vision(**settings)
    initialise(model, 0)
    return model


def images(side: int = 4) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shape = (BATCH, CHANNELS, side * PATCH, side * PATCH)
    return {"pixel_values": torch.randn(shape, generator=draw, dtype=torch.float64)}


def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
    out = model(**local)
    out["loss"].backward()
    gradients = whole_gradients(model, context)
    compiled = seqcomp.of(model)
    codes = {f.code for f in compiled.report().findings}
    model.zero_grad()
    context.traffic.reset()
    work = work_of(model, 5, lambda: model(**local)["loss"])
    said = counted(context) == reported(compiled.report())
    index = compiled.token_index().tolist()
    return out, gradients, codes, work, said, index


def on_ranks(plan: plans.Plan, **settings: int) -> list[Any]:
    batch = images(settings.get("side", 4))
    return lockstep(lambda: make(**settings), plan, step, inputs=batch, prepare=True)


def check(plan: plans.Plan, **settings: int) -> list[Any]:
    side = settings.get("side", 4)
    want = reference(lambda: make(**settings), images(side))
    ranks = on_ranks(plan, **settings)
    for out, gradients, *_ in ranks:
        assert value_distance(want.loss, out["loss"], FP64) <= 1
        assert value_distance(want.logits, out["logits"], FP64) <= 1
        gradient, worst = compare_grads(want.gradients, gradients, FP64)
        assert gradient <= 1, worst
    return ranks


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_patches_are_exact_and_divided(plan: plans.Plan) -> None:
    """16 patches: also the patch embedding is done by tokens, as a linear on each patch."""
    (single,) = on_ranks(ALONE)
    ranks = check(plan)
    patches = 2 * 2 * BATCH * 16 * CHANNELS * PATCH * PATCH * WIDTH  # forward, and of its weight
    for _, _, codes, work, said, _ in ranks:
        assert not codes & {"SC401", "SC402"}
        assert said
        done = work.flops["linear"] + work.flops["head"]
        assert done * len(ranks) == single[3].flops["linear"] + single[3].flops["head"] + patches
        assert work.flops["attention"] * len(ranks) == single[3].flops["attention"]
    if "tensor" not in plan["mesh"]:
        assert sorted(i for *_, index in ranks for i in index) == list(range(16))


def test_the_batch_is_cut_beside_it() -> None:
    """A data axis takes the first dim of the images."""
    plan = plans.with_data(plans.ulysses(2), 2)
    want = reference(make, images())
    for out, gradients, *_ in on_ranks(plan):
        assert value_distance(want.loss, out["loss"], FP64) <= 1
        assert len(out["logits"]) == 1
        gradient, worst = compare_grads(want.gradients, gradients, FP64)
        assert gradient <= 1, worst


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_class_tokens(plan: plans.Plan) -> None:
    """9 patches and 3 tokens of the model: the patches are made by all ranks, which is said."""
    for _, _, codes, _, said, _ in check(plan, classes=3, side=3):
        assert "SC401" not in codes
        assert "SC402" in codes
        assert said


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_other_lengths_are_refused_by_their_own_number(plan: plans.Plan) -> None:
    with pytest.raises(PlanError) as caught:
        on_ranks(plan, classes=1)
    (found,) = [d for d in caught.value.diagnostics if d.severity == "error"]
    assert found.code == "SC206"
    assert str(found.found) == "17"
    assert found.where == "blocks.0"
    assert "padding: pad" in found.help


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_other_lengths_are_padded(plan: plans.Plan) -> None:
    for _, _, codes, *_ in check({**plan, "padding": "pad"}, classes=1):
        assert "SC412" in codes
        assert "SC401" not in codes


def test_an_input_without_any_dim() -> None:
    """`pixel_values: {}`: neither batch nor sequence; the sequence is made inside all the same."""
    for *_, codes, _, said, _ in check({**plans.usp(2, 2), "inputs": {"pixel_values": {}}}):
        assert "SC401" not in codes
        assert said


def test_without_a_batch_there_is_nothing_for_data_ranks() -> None:
    plan = plans.with_data(plans.ulysses(2), 2)
    with pytest.raises(PlanError, match="SC503"):
        on_ranks({**plan, "inputs": {"pixel_values": {}}})


@pytest.mark.parametrize("plan", [plans.ring(2), plans.megatron(2)], ids=plans.name)
def test_windows_are_no_sequence(plan: plans.Plan) -> None:
    """Attention over parts of a sample: refused, never run whole on every rank in silence."""
    with pytest.raises(PlanError) as caught:
        on_ranks(plan, window=4)
    (found,) = [d for d in caught.value.diagnostics if d.severity == "error"]
    assert found.code == "SC316"
    assert "windows of a sample" in found.found
    assert "data: N" in found.help


def test_windows_under_data_parallelism() -> None:
    """What the refusal says to do instead."""
    plan = {"mesh": {"data": 2}, "strategies": {"data": {}}}
    report = seqcomp.verify(lambda: make(window=4), plan, inputs_fn=images)
    assert report.ok, str(report)
