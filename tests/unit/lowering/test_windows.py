"""Models with windows of attention: parity, and what each rank sends is what its report says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import seqcomp
from seqcomp.layout.masks import Band, Causal
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.layout.travel import travel_of
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import (
    FP64_WITH_FP32_INSIDE,
    compare_grads,
    field_of,
    reference,
    value_distance,
)
from tests.fixtures.lockstep import counted, reported, whole_gradients
from tests.fixtures.models import default_dtype

WINDOW, LENGTH, KV_HEADS, HEAD_DIM = 5, 48, 2, 8


def _config(name: str, **extra: Any) -> Any:
    import transformers

    return getattr(transformers, f"{name}Config")(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, pad_token_id=0,
        sliding_window=WINDOW, use_cache=False, **extra,
    )  # fmt: skip


def mistral() -> nn.Module:
    import transformers

    return transformers.MistralForCausalLM(_config("Mistral"))


def gemma() -> nn.Module:
    """A window in the first layer, all that came before in the second."""
    import transformers

    kinds = ["sliding_attention", "full_attention"]
    return transformers.Gemma3ForCausalLM(_config("Gemma3Text", layer_types=kinds))


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        model = make().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(draw * 0.3 / parameter.shape[-1] ** 0.5)
    return model.train()


def inputs(**extra: Any) -> dict[str, Any]:
    ids = torch.randint(3, 96, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone(), **extra}


def train(make: Callable[[], nn.Module], plan: plans.Plan, batch: dict[str, Any]) -> list[Any]:
    """(distance, rows of the report, counted) of each rank; the masks."""
    want = reference(lambda: build(make), batch)

    def step(model: nn.Module, context: Any, local: dict[str, Any]) -> Any:
        context.traffic.reset()
        out = model(**local)
        loss = field_of(out, "loss")
        assert loss is not None
        loss.backward()
        sent, report = counted(context), seqcomp.of(model).report()
        gradient, _ = compare_grads(
            want.gradients, whole_gradients(model, context), FP64_WITH_FP32_INSIDE
        )
        distances = value_distance(want.loss, loss, FP64_WITH_FP32_INSIDE), gradient
        return max(distances), report, sent

    return lockstep(lambda: build(make), plan, step, inputs=batch, prepare=True)


PLANS = [
    *(plans.ring(4, layout) for layout in plans.LAYOUTS),
    plans.ring(4, transport="allgather"),
    plans.ring(2, "zigzag", transport="allgather"),
    plans.usp(2, 2, "zigzag"),
    plans.ulysses(2),
]


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
@pytest.mark.parametrize("make", [mistral, gemma])
def test_parity_and_reports(make: Callable[[], nn.Module], plan: plans.Plan) -> None:
    for distance, report, sent in train(make, plan, inputs()):
        assert distance <= 1
        assert reported(report) == sent
        assert not any(row.at_most for row in report.comm)
        masks = [row.mask for row in report.kernels]
        assert masks == (["window", "window"] if make is mistral else ["window", "causal"])


def test_a_window_in_one_layer_and_a_ring_in_the_next() -> None:
    plan = plans.ring(4, "contiguous")
    travel = travel_of(Band(0, WINDOW - 1), SequenceLayout("contiguous", 4), LENGTH)
    assert travel is not None
    assert travel_of(Causal(), SequenceLayout("contiguous", 4), LENGTH) is None
    token = 2 * KV_HEADS * 2 * HEAD_DIM * 8
    for rank, (_, report, _) in enumerate(train(gemma, plan, inputs())):
        sent = {
            layer: sum(
                row.bytes_sent
                for row in report.comm
                if row.module == f"model.layers.{layer}.self_attn" and row.phase == "forward"
            )
            for layer in (0, 1)
        }
        assert sent == {0: sum(travel.sent(rank)) * token, 1: 3 * (LENGTH // 4) * token}


def test_layout_auto_is_contiguous_under_windows() -> None:
    """A window is as much work everywhere; zigzag would only have more edges."""
    for _, report, _ in train(mistral, plans.ring(2), inputs()):
        assert {row.layout for row in report.kernels} == {"contiguous"}


@pytest.mark.parametrize("transport", ["p2p", "allgather"])
def test_what_data_decides_is_an_upper_bound(transport: str) -> None:
    """Documents by position_ids: a window and a mask of data."""
    starts = torch.arange(LENGTH) % 16
    batch = inputs(position_ids=starts[None].expand(2, -1).contiguous())
    plan = plans.ring(4, "contiguous", transport=transport)
    less = 0
    for distance, report, sent in train(mistral, plan, batch):
        assert distance <= 1
        rows = reported(report)
        bounds = {(row.module, row.kind, row.axis, row.phase) for row in report.comm if row.at_most}
        assert {key[0] for key in bounds} == {f"model.layers.{i}.self_attn" for i in (0, 1)}
        for key, value in sent.items():
            if key in bounds:
                assert value[0] <= rows[key][0]
                assert value[1] < rows[key][1]
                less += rows[key][1] - value[1]
            else:
                assert value == rows[key]
        assert "at most" in str(report)
    assert less
