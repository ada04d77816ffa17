"""Attention that is written out is read as attention, or left alone; exact either way."""

from __future__ import annotations

import pytest
from torch import nn

import seqcomp
from seqcomp.lowering import ops
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.exports import exported_once
from tests.fixtures.written_out import LEFT, READ, Written, ids

PLANS = [
    plans.ring(4, "striped"),
    plans.usp(2, 2, "zigzag"),
    plans.with_tensor(plans.ulysses(2), 2),
]


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
@pytest.mark.parametrize("form", [*READ, *LEFT])
def test_exact(form: str, plan: plans.Plan) -> None:
    with exported_once(form):
        report = seqcomp.verify(lambda: Written(form), plan, inputs_fn=ids)
    assert report.ok, str(report)
    gathered = [text for text in report.findings if "SC401" in text]
    if form in READ:
        assert not gathered, gathered
    elif "tensor" not in plan["mesh"]:
        assert gathered, "the weights of all pairs exist, and someone must hear of it"


def attentions(form: str) -> list[ops.Attention]:
    def step(model: nn.Module, context, local) -> list[ops.Attention]:
        model(**local)
        program = seqcomp.of(model).programs[-1]
        return [n.target for n in program.flat.nodes if isinstance(n.target, ops.Attention)]

    with exported_once(form):
        return lockstep(lambda: Written(form), plans.ring(2), step, inputs=ids())[0]


@pytest.mark.parametrize("form", READ)
def test_read_as_attention(form: str) -> None:
    found = attentions(form)
    assert len(found) == 2
    assert {op.softcap for op in found} == {
        {"softcap": 2.0, "capped_with_sinks": 3.0}.get(form, 0.0)
    }


@pytest.mark.parametrize("form", LEFT)
def test_left_alone(form: str) -> None:
    assert attentions(form) == []
