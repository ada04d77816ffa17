"""The plan language: defaults, immutability, round trips."""

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from seqcomp.plan.load import dump_plan, load_plan
from seqcomp.plan.rules import check_language
from seqcomp.plan.schema import Plan

WHOLE_LANGUAGE = """\
name: free text
mesh: {data: 2, ring: 2, ulysses: 2, tensor: 2}
strategies:
  data: {gradients: sum}
  fsdp: {axes: [data, ring, ulysses], reshard: true, mixed_precision: none, offload: none}
  ring: {axis: ring, layout: auto, transport: p2p}
  ulysses: {axis: ulysses, pad_heads: false}
  megatron_sp: {axis: tensor}
overrides:
  - {match: "model.layers.*.self_attn", ring: {transport: allgather}}
  - {match: "**.experts", token_local: true}
  - {match: "**.mixer", gather: true}
inputs: {input_ids: {batch: 0, seq: 1, length: 131072}, position_ids: {seq: -1}}
outputs: {logits: drop}
padding: none
memory: {checkpoint: none, loss_chunks: 1, offload: none}
checks: call
"""


def test_whole_language_is_read() -> None:
    plan = load_plan(WHOLE_LANGUAGE)
    assert list(plan.mesh.items()) == [("data", 2), ("ring", 2), ("ulysses", 2), ("tensor", 2)]
    assert plan.strategies.fsdp is not None
    assert plan.strategies.fsdp.axes == ("data", "ring", "ulysses")
    assert [item.match for item in plan.overrides] == [
        "model.layers.*.self_attn", "**.experts", "**.mixer",
    ]  # fmt: skip
    assert plan.inputs["position_ids"].seq == -1
    assert plan.inputs["input_ids"].length == 131072
    assert plan.outputs["logits"] == "drop"


def test_defaults_are_those_of_the_language() -> None:
    short = load_plan("mesh: {ring: 2, ulysses: 2}\nstrategies: {ring: , ulysses: {}}\n")
    long = load_plan(
        "mesh: {ring: 2, ulysses: 2}\n"
        "strategies: {ring: {axis: ring, layout: auto, transport: p2p},"
        " ulysses: {axis: ulysses, pad_heads: false}}\n"
        "overrides: []\ninputs: {}\noutputs: {}\npadding: none\nchecks: call\n"
        "memory: {checkpoint: none, loss_chunks: 1, offload: none}\n"
    )
    assert short == long
    assert hash(short) == hash(long)


def test_mesh_order_is_part_of_a_plan() -> None:
    strategies = {"ring": {}, "ulysses": {}}
    one = load_plan({"mesh": {"ring": 2, "ulysses": 4}, "strategies": strategies})
    two = load_plan({"mesh": {"ulysses": 4, "ring": 2}, "strategies": strategies})
    assert one != two


def test_off_means_off() -> None:
    for text in ("off", "'off'"):
        assert load_plan(f"mesh: {{ring: 1}}\nstrategies: {{ring: {{}}}}\nchecks: {text}\n")
    plan = load_plan({"mesh": {"ring": 1}, "strategies": {"ring": {}}, "checks": False})
    assert plan.checks == "off"


def test_plans_are_immutable_all_the_way_down() -> None:
    plan = load_plan(WHOLE_LANGUAGE)
    with pytest.raises(ValidationError):
        plan.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.mesh["ring"] = 4  # type: ignore[index]
    with pytest.raises(AttributeError):
        plan.mesh._data = {}  # type: ignore[misc]
    with pytest.raises(ValidationError):
        plan.strategies.ring.layout = "zigzag"  # type: ignore[misc, union-attr]
    with pytest.raises(ValidationError):
        plan.inputs["input_ids"].seq = 2  # type: ignore[misc]
    assert isinstance(plan.overrides, tuple)


def test_copies_and_pickles_are_equal() -> None:
    plan = load_plan(WHOLE_LANGUAGE)
    assert copy.deepcopy(plan) == plan == pickle.loads(pickle.dumps(plan))
    assert load_plan(plan) is plan


def test_dumped_model_can_be_read_back() -> None:
    plan = load_plan(WHOLE_LANGUAGE)
    assert load_plan(plan.model_dump()) == plan
    assert load_plan(plan.to_dict()) == plan


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
SIZES = st.integers(1, 2**20)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any well-formed plan without contradictions in itself."""
    used = draw(st.lists(st.sampled_from(["data", "ring", "ulysses", "megatron_sp"]),
                         min_size=1, unique=True))  # fmt: skip
    axes = draw(st.lists(NAMES, min_size=len(used), max_size=len(used), unique=True))
    options = {
        "data": st.fixed_dictionaries({"gradients": st.sampled_from(["sum", "mean"])}),
        "ring": st.fixed_dictionaries({
            "layout": st.sampled_from(["auto", "contiguous", "striped", "zigzag"]),
            "transport": st.sampled_from(["p2p", "allgather"])}),
        "ulysses": st.fixed_dictionaries({"pad_heads": st.booleans()}),
        "megatron_sp": st.just({}),
    }  # fmt: skip
    strategies = {
        name: {**draw(options[name]), "axis": axis} for name, axis in zip(used, axes, strict=True)
    }
    shardable = [a for n, a in zip(used, axes, strict=True) if n != "megatron_sp"]
    if shardable and draw(st.booleans()):
        strategies["fsdp"] = {"axes": shardable, "reshard": draw(st.booleans())}
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    overrides = [
        {"match": "**.x", "token_local": True},
        {"match": "a.*.b*", "gather": True},
    ]
    if "ring" in used:
        overrides.append({"match": "m", "ring": {"transport": "allgather"}})
    return Plan.model_validate({
        "name": draw(text),
        "mesh": {axis: draw(SIZES) for axis in draw(st.permutations(axes))},
        "strategies": strategies,
        "overrides": draw(st.lists(st.sampled_from(overrides), max_size=3)),
        "inputs": draw(st.dictionaries(text, st.fixed_dictionaries(
            {"seq": st.integers(0, 3)}, optional={"length": SIZES, "batch": st.just(-1)}),
            max_size=3)),
        "outputs": draw(st.dictionaries(text, st.sampled_from(["full", "sharded", "drop"]),
                                        max_size=3)),
        "padding": draw(st.sampled_from(["none", "pad"])),
        "memory": {"loss_chunks": draw(SIZES)},
        "checks": draw(st.sampled_from(["call", "compile", "off"])),
    })  # fmt: skip


@given(plans())
@settings(max_examples=150, deadline=None)
def test_plans_survive_dumping_and_loading(plan: Plan) -> None:
    assert list(check_language(plan)) == []
    again = load_plan(dump_plan(plan))
    assert again == plan
    assert list(again.mesh) == list(plan.mesh)
    assert load_plan(plan.to_dict()) == plan
