"""Cross-field rules: what is refused, where, and what is said to be legal instead."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqcomp.diagnostics import Diagnostic
from seqcomp.plan.facts import AttentionFacts, ModelFacts
from seqcomp.plan.legality import head_degrees, length_factor, nearest_lengths
from seqcomp.plan.load import load_plan
from seqcomp.plan.match import covers, matches
from seqcomp.plan.rules import check_plan
from seqcomp.plan.schema import Plan


def facts(heads: int = 32, kv: int = 8, *, mask: str = "causal", **more: Any) -> ModelFacts:
    attentions = tuple(
        AttentionFacts(f"model.layers.{i}.self_attn", heads, kv, 128, mask == "causal", mask)
        for i in range(2)
    )
    return ModelFacts(attentions, hidden=heads * 128, mlp_width=14336, layers=2, **more)


def codes(found: list[Diagnostic]) -> list[str]:
    return [item.code for item in found]


def only(found: list[Diagnostic], code: str) -> Diagnostic:
    (item,) = [item for item in found if item.code == code]
    return item


def plan(mesh: dict[str, int], **more: Any) -> Plan:
    strategies = more.pop("strategies", {n: {} for n in mesh})
    return Plan.model_validate({"mesh": mesh, "strategies": strategies, **more})


def test_world_size_mismatch_names_both_and_the_ways_out() -> None:
    item = only(check_plan(load_plan("usp_4x8"), world_size=24), "SC104")
    assert (item.found, item.legal) == (24, 32)
    assert "32" in item.message
    assert "24" in item.message
    for way in ("start 32", "mesh.ring to 3", "mesh.ulysses to 6"):
        assert way in str(item.help)
    assert "add data: 2" in str(only(check_plan(load_plan("usp_4x8"), world_size=64), "SC104").help)
    assert codes(check_plan(load_plan("usp_4x8"), world_size=32)) == []


def test_axis_rules() -> None:
    unknown = plan({"ring": 2}, strategies={"ring": {"axis": "rign"}})
    found = check_plan(unknown)
    assert codes(found) == ["SC101", "SC102"]
    assert "ring" in str(only(found, "SC101").help)
    twice = plan({"ring": 2}, strategies={"ring": {}, "ulysses": {"axis": "ring"}})
    item = only(check_plan(twice), "SC103")
    assert item.found == ("ring", "ulysses")
    unused = plan({"ring": 2, "x": 2}, strategies={"ring": {}})
    assert only(check_plan(unused), "SC102").where == "mesh.x"
    renamed = plan({"cp": 2, "dp": 2}, strategies={"ring": {"axis": "cp"}, "data": {"axis": "dp"}})
    assert codes(check_plan(renamed)) == []


def test_fsdp_may_share_axes_but_not_the_tensor_axis() -> None:
    shared = plan(
        {"ring": 2, "tensor": 2},
        strategies={"ring": {}, "megatron_sp": {}, "fsdp": {"axes": ["ring"]}},
    )
    assert codes(check_plan(shared)) == []
    for axes, code in ((["tensor"], "SC112"), (["ring", "nope"], "SC101"), (["ring"] * 2, "SC103")):
        wrong = {"ring": {}, "megatron_sp": {}, "fsdp": {"axes": axes}}
        assert codes(check_plan(plan({"ring": 2, "tensor": 2}, strategies=wrong))) == [code]
    own = plan({"shard": 4, "ring": 2}, strategies={"ring": {}, "fsdp": {"axes": ["shard"]}})
    assert codes(check_plan(own)) == []
    assert codes(check_plan(plan({"x": 2}, strategies={"fsdp": {}}))) == ["SC102", "SC113"]


@pytest.mark.parametrize(
    ("name", "heads", "kv", "expected", "legal"),
    [
        ("ulysses_8", 32, 8, None, None),
        ("ulysses_32", 32, 8, "SC403", None),
        ("ulysses_3", 32, 8, "SC201", (1, 2, 4, 8, 16, 32)),
        ("ulysses_64", 32, 8, "SC201", (1, 2, 4, 8, 16, 32)),
        ("ulysses_6", 12, 4, "SC202", (1, 2, 4, 12)),
        ("ulysses_4+megatron_sp_8", 32, 8, "SC403", None),
        ("ulysses_8+megatron_sp_8", 32, 8, "SC201", (1, 2, 4)),
        ("megatron_sp_5", 32, 8, "SC203", (1, 2, 4, 8, 16, 32)),
        ("megatron_sp_6", 12, 4, "SC204", (1, 2, 4, 12)),
        ("megatron_sp_16", 32, 8, "SC403", None),
        ("ring_7", 32, 8, None, None),
    ],
)
def test_heads(name: str, heads: int, kv: int, expected: str | None, legal: Any) -> None:
    found = [
        item
        for item in check_plan(load_plan(name), facts(heads, kv))
        if item.code.startswith(("SC201", "SC202", "SC203", "SC204", "SC403"))
    ]
    assert [item.code for item in found] == ([expected] if expected else [])
    if legal:
        assert found[0].legal == legal
        for part in ("model.layers.0.self_attn", "query heads", "KV heads"):
            assert part in found[0].message
        assert ("strategies.ulysses.pad_heads: true" in found[0].help) == name.startswith("ulysses")


@pytest.mark.parametrize(
    ("degree", "heads", "kv", "expected"),
    [
        (
            3,
            32,
            8,
            ("11 query heads and 4 KV heads", "1 query heads of zeros (1.03 x", "+10 heads"),
        ),
        (
            64,
            32,
            8,
            ("1 query heads and 1 KV heads", "32 query heads of zeros (2.00 x", "+64 heads"),
        ),
        (7, 28, 4, ("4 query heads and 2 KV heads", "0 query heads of zeros (1.00 x", "+14 heads")),
    ],
)
def test_pad_heads_lifts_the_limit(
    degree: int, heads: int, kv: int, expected: tuple[str, ...]
) -> None:
    padded = plan({"ulysses": degree}, strategies={"ulysses": {"pad_heads": True}})
    item = only(check_plan(padded, facts(heads, kv)), "SC411")
    for part in expected:
        assert part in item.message


def test_pad_heads_says_nothing_where_heads_fit() -> None:
    padded = plan({"ulysses": 4}, strategies={"ulysses": {"pad_heads": True}})
    assert codes(check_plan(padded, facts())) == []


def test_mlp_width() -> None:
    found = check_plan(load_plan("megatron_sp_16"), facts(16, 16, length=16))
    assert "SC205" not in codes(found)
    wide = ModelFacts(facts(16, 16).attentions, hidden=2048, mlp_width=1000)
    item = only(check_plan(load_plan("megatron_sp_16"), wide), "SC205")
    assert item.found == 16
    assert item.legal == (1, 2, 4, 5, 8, 10, 20, 25, 40, 50, 100, 125, 200, 250, 500, 1000)


@pytest.mark.parametrize(
    ("name", "length", "factor", "legal"),
    [
        ("usp_4x8", 1000, 32, (992, 1024)),
        ("usp_3x3", 100, 18, (90, 108)),
        ("ring_4_zigzag", 12, 8, (8, 16)),
        ("ring_4", 13, 4, (12, 16)),
        ("ring_4_striped", 3, 4, (4,)),
        ("ulysses_8", 20, 8, (16, 24)),
        ("usp_2x2+megatron_sp_3", 13, 12, (12, 24)),
    ],
)
def test_lengths(name: str, length: int, factor: int, legal: tuple[int, ...]) -> None:
    item = only(check_plan(load_plan(name), seq_len=length), "SC206")
    assert f"multiple of {factor} " in item.message
    assert item.legal == legal
    for good in legal:
        assert "SC206" not in codes(check_plan(load_plan(name), seq_len=good))


def test_lengths_in_the_plan_and_of_the_model() -> None:
    insisting = plan({"ring": 4}, inputs={"ids": {"seq": 1, "length": 10}})
    item = only(check_plan(insisting), "SC206")
    assert item.where == "inputs.ids.length"
    assert codes(check_plan(insisting, seq_len=16)) == ["SC503"]
    assert codes(check_plan(load_plan("ring_4"), facts(length=10))) == ["SC206", "SC207"]
    padded = only(check_plan(plan({"ring": 4}, padding="pad"), seq_len=13), "SC412")
    assert "13 tokens is padded to 16" in padded.message
    assert codes(check_plan(plan({"ring": 4}, padding="pad"), seq_len=16)) == []


def test_balance_is_a_warning_never_an_error() -> None:
    contiguous = load_plan("ring_4_contiguous")
    item = only(check_plan(contiguous, facts()), "SC207")
    assert item.severity == "warning"
    assert "7 times" in item.message
    assert codes(check_plan(contiguous, facts(mask="full"))) == []
    assert codes(check_plan(load_plan("ring_4"), facts(), seq_len=16)) == []
    item = only(check_plan(load_plan("ring_4"), facts(), seq_len=12), "SC207")
    assert "8 or 16" in str(item.help)
    note = only(check_plan(load_plan("ring_4_zigzag"), facts(mask="full")), "SC208")
    assert note.severity == "note"
    for mask in ("data", "other"):  # packed documents are, for all that is known, causal
        assert codes(check_plan(load_plan("ring_4_zigzag"), facts(mask=mask))) == []
    none = ModelFacts((), hidden=8)
    assert codes(check_plan(load_plan("ring_4"), none)) == ["SC209"]


def test_overrides() -> None:
    paths = ["", "model", "model.layers", *(f"model.layers.{i}.self_attn" for i in range(2))]
    ring = {"ring": {"transport": "allgather"}}
    good = plan({"ring": 2}, overrides=[{"match": "model.layers.*.self_attn", **ring}])
    assert codes(check_plan(good, facts(), module_paths=paths)) == []
    wrong = plan({"ring": 2}, overrides=[{"match": "model.layer.*.self_attn", **ring}])
    item = only(check_plan(wrong, facts(), module_paths=paths), "SC107")
    assert "did you mean model.layers." in str(item.help)
    assert item.where == "overrides[0].match"
    assert codes(check_plan(wrong)) == []
    beside = plan({"ring": 2}, overrides=[{"match": "model.norm", **ring}])
    found = check_plan(beside, facts(), module_paths=[*paths, "model.norm"])
    assert "no attention" in only(found, "SC107").message
    empty = plan({"ring": 2}, overrides=[{"match": "a"}])
    assert codes(check_plan(empty)) == ["SC109"]
    both = plan({"ring": 2}, overrides=[{"match": "a", "gather": True, "token_local": True}])
    assert codes(check_plan(both)) == ["SC109"]
    stray = plan({"ulysses": 2}, overrides=[{"match": "a", **ring}])
    assert codes(check_plan(stray)) == ["SC108"]


def test_memory() -> None:
    alone = plan({"ring": 2}, memory={"offload": "cpu"})
    assert only(check_plan(alone), "SC117").where == "memory.offload"
    assert (
        codes(check_plan(plan({"ring": 2}, memory={"offload": "cpu", "checkpoint": "block"}))) == []
    )


def test_inputs() -> None:
    same = plan({"ring": 2}, inputs={"x": {"batch": 1, "seq": 1}})
    assert only(check_plan(same), "SC110").where == "inputs.x.seq"
    lost = plan({"ring": 2}, inputs={"x": {"batch": 1, "length": 4}})
    assert codes(check_plan(lost)) == ["SC110"]


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.b.c", False),
        ("a.*", "a.b.c", False),
        ("*", "a", True),
        ("**.c", "c", True),
        ("**.c", "a.b.c", True),
        ("**", "", True),
        ("*", "", False),
        ("a.**.c", "a.c", True),
        ("a.**", "a", True),
        ("layer*.q", "layers.q", True),
        ("layer*.q", "layers.x.q", False),
        ("a.b", "axb", False),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


PARTS = st.lists(st.sampled_from(["a", "b", "ab", "ba", "*", "**", "a*", "*b", "a*b*"]), max_size=5)


@given(PARTS.filter(bool), st.lists(st.sampled_from(["a", "b", "ab", "aab"]), max_size=5))
def test_patterns_mean_what_regular_expressions_mean(pattern: list[str], path: list[str]) -> None:
    parts = [
        r"(\.[^.]+)*" if part == "**" else r"\." + part.replace("*", "[^.]*") for part in pattern
    ]
    regex = re.compile("".join(parts))
    dotted = [f".{part}" for part in path]
    expected = regex.fullmatch("".join(dotted)) is not None
    assert matches(".".join(pattern), ".".join(path)) is expected
    inside = any(regex.fullmatch("".join(dotted[:n])) for n in range(len(path) + 1))
    assert covers(".".join(pattern), ".".join(path)) is inside


def test_hostile_patterns_are_matched_quickly() -> None:
    assert not matches("**.a." * 500 + "x", "a." * 500 + "y")
    assert not matches("*a" * 500 + "b", "a" * 2000)


def test_covering_includes_what_lies_inside() -> None:
    assert covers("model.layers.0", "model.layers.0.self_attn")
    assert not covers("model.layers.0.self_attn", "model.layers.0")


@given(st.integers(1, 256), st.integers(1, 64))
def test_head_degrees_are_exactly_the_legal_ones(kv: int, group: int) -> None:
    heads = kv * group
    legal = [p for p in range(1, heads + 1)
             if heads % p == 0 and (kv % p == 0 or p % kv == 0)]  # fmt: skip
    assert list(head_degrees(heads, kv)) == legal


@given(
    st.integers(1, 10**6),
    st.sampled_from(["contiguous", "striped", "zigzag"]),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_nearest_lengths_are_legal_and_nearest(
    length: int, kind: str, ring: int, inner: int
) -> None:
    factor = length_factor(kind, ring, inner)
    near = nearest_lengths(length, factor)
    assert all(value > 0 and value % factor == 0 for value in near)
    assert all(abs(value - length) < factor for value in near)
    assert (length % factor == 0) == (near == (length,))
