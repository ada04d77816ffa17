"""Preset names, and the files in plans/ that say the same."""

from pathlib import Path

import pytest

from seqcomp.diagnostics import PlanError
from seqcomp.integrations.validate import validate
from seqcomp.plan.load import load_plan

PLANS = sorted((Path(__file__).parents[3] / "plans").glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "mesh", "strategies"),
    [
        ("usp_4x8", [("ring", 4), ("ulysses", 8)], {"ring": {"layout": "zigzag"}, "ulysses": {}}),
        ("megatron_sp_8", [("tensor", 8)], {"megatron_sp": {}}),
        ("ulysses_8", [("ulysses", 8)], {"ulysses": {}}),
        ("ring_8", [("ring", 8)], {"ring": {}}),
        ("ring_1", [("ring", 1)], {"ring": {}}),
        ("data_2", [("data", 2)], {"data": {}}),
        ("fsdp_8", [("data", 8)], {"data": {}, "fsdp": {}}),
        ("ring_2+fsdp", [("ring", 2)], {"ring": {}, "fsdp": {}}),
        ("ring_4_striped", [("ring", 4)], {"ring": {"layout": "striped"}}),
        ("ring_2+data_3", [("data", 3), ("ring", 2)], {"data": {}, "ring": {}}),
        (
            "megatron_sp_2+usp_3x5+data_7",
            [("data", 7), ("ring", 3), ("ulysses", 5), ("tensor", 2)],
            {"data": {}, "ring": {"layout": "zigzag"}, "ulysses": {}, "megatron_sp": {}},
        ),
    ],
)
def test_composition(name: str, mesh: list[tuple[str, int]], strategies: dict[str, object]) -> None:
    plan = load_plan(name)
    assert list(plan.mesh.items()) == mesh
    assert plan.to_dict()["strategies"] == strategies


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("ring_2+ring_2", "SC013"),
        ("usp_2x2+ulysses_2", "SC013"),
        ("data_2+fsdp_2", "SC013"),
        ("fsdp", "SC011"),
        ("ring_0", "SC010"),
        ("usp_0x2", "SC010"),
        ("ring", "SC012"),
        ("usp_2", "SC012"),
        ("ring_2+", "SC012"),
        ("ring_2++data_2", "SC012"),
        ("megatron_sp_2+fsdp", "SC113"),
    ],
)
def test_refused_presets(name: str, code: str) -> None:
    with pytest.raises(PlanError) as caught:
        load_plan(name)
    assert [item.code for item in caught.value.diagnostics] == [code]


def test_all_strategies_have_plan_files() -> None:
    used = {name for path in PLANS for name in load_plan(path).to_dict()["strategies"]}
    assert used == {"data", "fsdp", "ring", "ulysses", "megatron_sp"}
    assert len(PLANS) >= 12


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_plan_files_are_valid_and_say_what_their_names_say(path: Path) -> None:
    plan = load_plan(path)
    same = load_plan(path.stem.removesuffix("_memory"))
    if path.stem.endswith("_memory"):
        assert plan.memory != same.memory
        assert (plan.mesh, plan.strategies) == (same.mesh, same.strategies)
    else:
        assert same == plan
    assert validate(path) == []
    assert load_plan(plan.to_dict()) == plan


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_plan_files_have_a_header(path: Path) -> None:
    lines = path.read_text().splitlines()
    header = "\n".join(lines[: next(i for i, line in enumerate(lines) if line[:1] != "#")])
    for part in ("Hardware:", "Launch:", "torchrun", f"plans/{path.name}"):
        assert part in header
    assert "not available yet" not in header
