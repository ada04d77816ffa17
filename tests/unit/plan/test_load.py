"""Reading plans: positions, messages, limits, and that nothing but PlanError comes out."""

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqcomp.diagnostics import Diagnostic, PlanError
from seqcomp.plan.load import load_plan
from seqcomp.plan.reader import MAX_BYTES
from seqcomp.plan.schema import Plan


def refused(source: object) -> tuple[Diagnostic, ...]:
    with pytest.raises(PlanError) as caught:
        load_plan(source)
    return caught.value.diagnostics


def one(source: object) -> Diagnostic:
    (item,) = refused(source)
    return item


def test_every_error_is_shown_at_once_with_its_place() -> None:
    text = (
        "mesh: {rign: 4, ulysses: '2'}\n"
        "strategies:\n"
        "  ring: {layout: zigzga, transprt: p2p}\n"
        "  ulysses:\n"
        "pading: none\n"
        "checks: sometimes\n"
        "mesh: 3\n"
    )
    found = {(item.code, item.where) for item in refused(text)}
    assert found >= {
        ("SC004", "<plan>:7:1 mesh"),
        ("SC008", "<plan>:1:26 mesh.ulysses"),
        ("SC009", "<plan>:3:18 strategies.ring.layout"),
        ("SC007", "<plan>:3:26 strategies.ring.transprt"),
        ("SC007", "<plan>:5:1 pading"),
        ("SC009", "<plan>:6:9 checks"),
    }


def test_rules_are_checked_beside_the_form() -> None:
    text = "mesh: {ring: 4, spare: 0}\nstrategies:\n  ring: {layout: zig}\n  ulysses:\n"
    places = [(item.code, item.where) for item in refused(text)]
    assert ("SC101", "<plan>:4:3 strategies.ulysses.axis") in places
    assert ("SC102", "<plan>:1:17 mesh.spare") in places
    assert ("SC010", "<plan>:1:24 mesh.spare") in places
    assert ("SC009", "<plan>:3:18 strategies.ring.layout") in places


@pytest.mark.parametrize(
    ("text", "code", "where", "hint"),
    [
        ("mesh: {ring: 2}\nstrategies: {rign: {}}\n", "SC007", "<plan>:2:14", "ring"),
        ("mesh: {ring: 2}\nstrategies: {ring: {}}\nckecks: off\n", "SC007", "<plan>:3:1", "checks"),
        ("mesh: {ring: 2}\nstrategies: {ring: {layout: zag}}\n", "SC009", "<plan>:2:29", "zigzag"),
        ("mesh: {ring: 0}\nstrategies: {ring: {}}\n", "SC010", "<plan>:1:14", "at least 1"),
        ("mesh: {ring: -3}\nstrategies: {ring: {}}\n", "SC010", "<plan>:1:14", "at least 1"),
        ("mesh: {ring: yes}\nstrategies: {ring: {}}\n", "SC008", "<plan>:1:14", "whole number"),
        ("mesh: {ring: 2.0}\nstrategies: {ring: {}}\n", "SC008", "<plan>:1:14", "whole number"),
        ("mesh: {ring: true}\nstrategies: {ring: {}}\n", "SC008", "<plan>:1:14", "whole number"),
        ("mesh: {ring: 2}\nstrategies: {ring: 4}\n", "SC008", "<plan>:2:20", "mapping"),
        ("mesh: {ring: 2}\nstrategies: {ring: {}}\nname: 3\n", "SC008", "<plan>:3:7", "quotes"),
        ("mesh: {r-g: 2}\nstrategies: {ring: {axis: r-g}}\n", "SC014", "<plan>:2:27", ""),
        ("mesh: {ring: 2}\nstrategies: {ring: {}}\nmesh: {}\n", "SC004", "<plan>:3:1", "keep one"),
        ("strategies: {ring: {}}\n", "SC011", "<plan>:1:1", "mesh: {ring: 4}"),
        ("mesh: {}\nstrategies: {}\n", "SC011", "<plan>:1:7", "mesh: {ring: 4}"),
        ("mesh: {ring: 2\n", "SC002", "<plan>:2:1", ""),
        ("mesh:\n\tring: 2\n", "SC002", "<plan>:2:1", ""),
        ("mesh: {ring: 2}\n---\nmesh: {ring: 2}\n", "SC002", "<plan>:2:1", ""),
        ("a: &x [1]\nb: *x\n", "SC005", "<plan>:1:4", ""),
        ("mesh: !!python/object/apply:os.system [ls]\n", "SC005", "<plan>:1:7", ""),
        ("mesh: {ring: !!int '2'}\n", "SC005", "<plan>:1:14", ""),
        ("- a\n- b\n", "SC003", "<plan>:1:1", "mesh"),
        ("", "SC003", "<plan>", "mesh"),
        ("mesh: {1: 2}\n", "SC008", "<plan>:1:8", "plain word"),
        ('name: "\\UFFFFFFFF"\n', "SC002", "<plan>", ""),
        ("name: a\x01b\n", "SC002", "<plan>:1:8", ""),
        ("strategies: {ring: {}}\nmesh: {ring: 2}\noverrides: [{match: a..b, gather: true}]\n",
         "SC014", "<plan>:3:21", ""),
        (("strategies: {ring: {}}\nmesh: {ring: 2}\n"
          "overrides:\n- match: a\n  ring: {layout: zigzag, transport: p2p}\n"),
         "SC007", "<plan>:5:10", "strategies.ring"),
    ],
)  # fmt: skip
def test_messages(text: str, code: str, where: str, hint: str) -> None:
    matching = [item for item in refused(text) if item.code == code]
    assert matching, refused(text)
    assert any(item.where.split(" ")[0] == where for item in matching), matching
    assert any(hint in str(item) for item in matching)


def test_allowed_values_are_listed() -> None:
    item = one("mesh: {ring: 2}\nstrategies: {ring: {transport: tcp}}\n")
    assert item.found == "tcp"
    assert item.legal == ("p2p", "allgather")
    item = one("mesh: {ring: 2}\nstrategies: {ring: {lay: x}}\n")
    assert item.legal == ("axis", "layout", "transport")


def test_files_are_named_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("# comment\nmesh: {ring: 2}\nstrategies:\n  ulysses: {}\n")
    where = {item.where for item in refused(path)}
    assert where == {f"{path}:4:3 strategies.ulysses.axis", f"{path}:2:8 mesh.ring"}
    assert {item.where for item in refused(str(path))} == where


@pytest.mark.parametrize("bad", ["directory", "missing", "binary", "huge"])
def test_unreadable_files(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "p.yaml"
    if bad == "directory":
        path.mkdir()
    elif bad == "binary":
        path.write_bytes(b"mesh: \xff\xfe")
    elif bad == "huge":
        path.write_bytes(b"#" * (MAX_BYTES + 1))
    assert one(path).code == ("SC006" if bad == "huge" else "SC001")


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xef\xbb\xbfmesh: {ring: 2}\nstrategies: {ring: {}}\n")
    assert load_plan(path).mesh == {"ring": 2}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{a: " * 5_000,
        "\n".join(" " * i + "a:" for i in range(300)) + "\n",
        "a: [" + "b, " * 200_000 + "]\n",
        "- " * 5_000 + "\n",
    ],
)
def test_size_and_nesting_are_limited(text: str) -> None:
    assert one(text + "\n").code == "SC006"


def test_a_mesh_has_few_axes() -> None:
    axes = ", ".join(f"a{i}: 1" for i in range(17))
    assert one(f"mesh: {{{axes}}}\nstrategies: {{ring: {{axis: a0}}}}\n").code == "SC006"


def test_objects_with_cycles_or_sharing_are_limited() -> None:
    loop: dict[str, Any] = {}
    loop["mesh"] = loop
    assert "SC006" in {item.code for item in refused(loop)}
    bomb: list[Any] = []
    for _ in range(12):
        bomb = [bomb] * 10
    assert "SC006" in {item.code for item in refused({"mesh": bomb})}


@pytest.mark.parametrize("source", [None, 3, 2.5, [], object(), b"mesh", True])
def test_other_types_are_refused(source: object) -> None:
    assert one(source).code == "SC015"


def test_unknown_presets_suggest_one() -> None:
    item = one("usp_4x")
    assert item.code == "SC012"
    assert "usp_4x8" in str(item.help)
    missing = one("plans/usp_3x3.yaml")
    assert missing.code == "SC001"
    assert "usp_3x3" in str(missing.help)


WORDS = st.sampled_from(
    ["mesh", "strategies", "ring", "ulysses", "data", "fsdp", "axis", "layout", "overrides",
     "match", "inputs", "seq", "memory", "zigzag", "off", "**.x", "transport", "name", "checks"]
)  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), WORDS,
    st.integers(1, 8), st.binary(max_size=3), st.integers(5, 6).map(lambda n: 10 ** (1000 * n)),
)  # fmt: skip
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.one_of(WORDS, SCALARS), inner, max_size=4),
    ),
    max_leaves=12,
)


def check_never_surprises(source: object) -> None:
    found: tuple[Diagnostic, ...] = ()
    try:
        plan = load_plan(source)
    except PlanError as error:
        found, text = error.diagnostics, str(error)
    else:
        assert isinstance(plan, Plan)
        return
    assert found
    assert text
    for item in found:
        assert item.severity == "error"
        item.to_json()


@given(TREES)
@settings(max_examples=300, deadline=None)
def test_garbage_objects_raise_only_plan_errors(tree: object) -> None:
    check_never_surprises(tree)
    check_never_surprises({"mesh": {"ring": 2}, "strategies": {"ring": {}}, "name": tree})
    check_never_surprises({"mesh": tree, "strategies": tree, "overrides": tree, "inputs": tree})
    check_never_surprises({"mesh": {"ring": 2}, "strategies": {"ring": tree, "fsdp": tree}})


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_garbage_text_raises_only_plan_errors(text: str) -> None:
    check_never_surprises(text)
    check_never_surprises(text + "\n")
    check_never_surprises("mesh: {ring: 2}\nstrategies: {ring: {}}\nname: " + text + "\n")


YAML_PIECES = st.sampled_from(
    [*"{}[]:,-&*!|>'\"%@`#?\n\t ", ": ", "\n  ", "- ", "? ", "<<: ", "---\n", "...\n", "!!int ",
     "0x_", "1:30", "2024-01-01", ".inf", "~", "\\x", "\\ud800", "%YAML 9", "mesh", "ring", "4",
     *string.ascii_letters[:4]]
)  # fmt: skip


@given(st.lists(YAML_PIECES, max_size=25).map("".join))
@settings(max_examples=500, deadline=None)
def test_garbage_yaml_raises_only_plan_errors(text: str) -> None:
    check_never_surprises(text + "\n")


@given(
    st.integers(0, 6),
    st.integers(0, 12),
    st.text(string.ascii_lowercase, min_size=1, max_size=8).filter(lambda t: t not in ("mesh",)),
)
@settings(max_examples=60, deadline=None)
def test_positions_are_right(lines: int, column: int, key: str) -> None:
    text = "# line\n" * lines + "mesh: {ring: 2}\nstrategies:\n  ring: {"
    text += " " * column + f"x{key}: 1}}\n"
    item = one(text)
    assert item.where.split(" ")[0] == f"<plan>:{lines + 3}:{10 + column}"
