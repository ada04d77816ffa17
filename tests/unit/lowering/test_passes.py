"""Properties of lowered graphs: what is cut where, how often, and what can be dumped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import seqcomp
from seqcomp.capture.edit import op_name
from seqcomp.lowering import ops
from seqcomp.lowering.context import Pass, check_schedule
from seqcomp.lowering.passes import PASSES
from seqcomp.lowering.program import Program
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.models import M0, Spec, build, inputs

PLAN = plans.usp(2, 2, "zigzag")


def program_of(spec: Spec = M0, plan: plans.Plan = PLAN) -> Program:
    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Program:
        model(**local)
        return seqcomp.of(model).programs[0]

    return lockstep(lambda: build(spec), plan, step, inputs=inputs(spec))[0]


def of_kind(program: Program, kind: type[ops.Op]) -> list[Any]:
    return [node for node in program.flat.nodes if isinstance(node.target, kind)]


@pytest.mark.parametrize("positions", ["arange", "table", "complex"])
def test_rotary_tables_are_cut_once_for_the_model(positions: str) -> None:
    def cuts(layers: int) -> int:
        spec = Spec(layers=layers, causal=(True,) * layers, positions=positions)
        return len(of_kind(program_of(spec), ops.Shard))

    assert cuts(1) == cuts(4)


def test_rotary_tables_are_computed_on_local_tokens() -> None:
    """cos and sin come after the cut, so their work is divided too."""
    program = program_of()
    for node in program.flat.nodes:
        if op_name(node) in ("aten.cos", "aten.sin"):
            (operand,) = node.all_input_nodes
            assert isinstance(operand.target, ops.Shard)


def test_nothing_is_gathered_but_the_output() -> None:
    program = program_of()
    gathers = of_kind(program, ops.Gather)
    assert [(g.target.label, g.target.cotangent) for g in gathers] == [("logits", "replicated")]
    reduced = of_kind(program, ops.AllReduce)
    assert [node.target.label for node in reduced] == ["loss"]


def test_keys_and_values_reach_attention_unrepeated() -> None:
    """Also where the model repeats them itself before its call."""
    for spec in (M0, Spec(attention="expanded")):
        nodes = of_kind(program_of(spec), ops.Attention)
        assert len(nodes) == 2
        for node in nodes:
            assert [operand.meta["val"].shape[1] for operand in node.args[:3]] == [4, 2, 2]


def test_each_parameter_is_in_one_bucket() -> None:
    """Also a tied one, which has two uses."""
    program = program_of(Spec(tied=True))
    (bucket,) = of_kind(program, ops.OpenBucket)
    names = [program.capture.state[node.name] for node in bucket.args]
    model = build(Spec(tied=True))
    assert len(names) == len(list(model.parameters()))
    assert {model.get_parameter(name) for name in names} == set(model.parameters())


def test_groups_are_known_before_the_first_call() -> None:
    assert set(program_of().groups()) == {("ring", "ulysses")}
    data = plans.with_data(plans.ring(2, "zigzag"), 2)
    assert ("data", "ring") in program_of(plan=data).groups()


def test_every_pass_can_be_dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQCOMP_DUMP", str(tmp_path))
    model = seqcomp.parallelize(build(), plan={"mesh": {"ring": 1}, "strategies": {"ring": {}}})
    model(**inputs())
    (folder,) = tmp_path.iterdir()
    files = sorted(path.name for path in folder.iterdir())
    assert files == [f"{i:02d}_{step.name}.txt" for i, step in enumerate(PASSES)]
    for path in folder.iterdir():
        text = path.read_text()
        assert "placeholder[target=input_ids]" in text
        assert "return" in text


def test_no_dump_without_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEQCOMP_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    program_of()
    assert list(tmp_path.iterdir()) == []


def test_the_schedule_keeps_its_contracts() -> None:
    check_schedule(PASSES)
    with pytest.raises(AssertionError, match="needs"):
        check_schedule(tuple(reversed(PASSES)))
    with pytest.raises(AssertionError, match="lonely"):
        check_schedule([Pass("lonely", lambda graph, _: graph, requires=("nothing gives this",))])


@pytest.mark.parametrize("kind", [ops.Shard(1, ("ring",)), ops.AllReduce(("ring",), "partial")])
def test_unbound_operations_do_not_run(kind: ops.Op) -> None:
    with pytest.raises(AssertionError, match="not bound"):
        kind(1)
