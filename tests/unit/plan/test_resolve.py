"""Resolution: everything explicit, layouts chosen, overrides applied."""

import dataclasses

import pytest

from seqcomp.diagnostics import PlanError
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.plan.legality import length_factor
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import ResolvedPlan, resolve
from seqcomp.plan.schema import Plan


def test_axes_and_sizes() -> None:
    resolved = resolve(load_plan("data_2+usp_3x4"))
    assert list(resolved.axes.items()) == [("data", 2), ("ring", 3), ("ulysses", 4)]
    assert resolved.sequence_axes == ("ring", "ulysses")
    assert resolved.batch_axes == ("data",)
    assert (resolved.data_size, resolved.ring_size, resolved.ulysses_size) == (2, 3, 4)
    assert (resolved.tensor_axis, resolved.tensor_size) == (None, 1)
    assert (resolved.world_size, resolved.sequence_size, resolved.inner_size) == (24, 12, 4)


def test_nesting_does_not_follow_the_mesh_order() -> None:
    plan = load_plan({"mesh": {"u": 4, "r": 2},
                      "strategies": {"ulysses": {"axis": "u"}, "ring": {"axis": "r"}}})  # fmt: skip
    resolved = resolve(plan)
    assert resolved.sequence_axes == ("r", "u")
    assert list(resolved.axes) == ["u", "r"]


@pytest.mark.parametrize(
    ("preset", "length", "causal", "kind"),
    [
        ("ring_4", 16, True, "zigzag"),
        ("ring_4", 12, True, "contiguous"),
        ("ring_4", 16, False, "contiguous"),
        ("ring_4", None, True, "zigzag"),
        ("ring_4_zigzag", 16, False, "zigzag"),
        ("ring_4_striped", 12, True, "striped"),
        ("ring_4_contiguous", 16, True, "contiguous"),
        ("ring_1", 7, True, "contiguous"),
        ("usp_1x4", 12, True, "contiguous"),
        ("ulysses_4", 12, True, "contiguous"),
    ],
)
def test_layouts(preset: str, length: int | None, causal: bool, kind: str) -> None:
    resolved = resolve(load_plan(preset))
    layout = resolved.layout_for(length, causal)
    assert layout == SequenceLayout(kind, resolved.ring_size, resolved.inner_size)
    if length is not None:
        assert length % layout.factor == 0


@pytest.mark.parametrize("kind", ["contiguous", "striped", "zigzag"])
def test_length_rule_is_that_of_the_layout(kind: str) -> None:
    for ring in range(2, 7):
        for inner in range(1, 7):
            assert length_factor(kind, ring, inner) == SequenceLayout(kind, ring, inner).factor


def test_transport_overrides_apply_inside_and_the_last_wins() -> None:
    plan = load_plan({
        "mesh": {"ring": 2}, "strategies": {"ring": {}},
        "overrides": [
            {"match": "model.layers.*", "ring": {"transport": "allgather"}},
            {"match": "model.layers.1.self_attn", "ring": {"transport": "p2p"}},
        ],
    })  # fmt: skip
    resolved = resolve(plan)
    assert resolved.transport_for("model.layers.0.self_attn") == "allgather"
    assert resolved.transport_for("model.layers.1.self_attn") == "p2p"
    assert resolved.transport_for("model.other") == "p2p"


def test_inputs_and_outputs() -> None:
    plan = load_plan({
        "mesh": {"ring": 2}, "strategies": {"ring": {}}, "inputs": {"ids": {"batch": 0, "seq": 1}},
        "outputs": {"logits": "drop"}, "checks": "off",
    })  # fmt: skip
    resolved = resolve(plan)
    spec = resolved.input_spec("ids")
    assert spec is not None
    assert (spec.batch, spec.seq) == (0, 1)
    assert resolved.input_spec("other") is None
    assert (resolved.output_mode("logits"), resolved.output_mode("x")) == ("drop", "full")
    assert resolved.checks == "off"
    assert resolved.gradients == "sum"


def test_resolving_raises_all_errors_at_once() -> None:
    plan = Plan.model_validate({"mesh": {"ring": 2, "x": 3}, "strategies": {"ring": {}}})
    with pytest.raises(PlanError) as caught:
        resolve(plan, world_size=4, seq_len=3)
    assert [item.code for item in caught.value.diagnostics] == ["SC102", "SC104", "SC206"]


def test_resolved_plans_are_frozen_and_hashable() -> None:
    resolved = resolve(load_plan("usp_2x2"))
    assert isinstance(resolved, ResolvedPlan)
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.ring_axis = "x"  # type: ignore[misc]
    assert hash(resolved) == hash(resolve(load_plan("usp_2x2")))
