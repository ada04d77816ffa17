"""Identical layers are placed once; the work grows with neither layers nor ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seqcomp.capture.call import bind_call, classify_inputs, signature_of
from seqcomp.lowering.build import Request, build_program
from seqcomp.lowering.variants import sizes_of
from seqcomp.placement import assign
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve
from tests.fixtures.models import Spec, build, inputs

WIDE = Spec(heads=8, kv_heads=8, vocab=96, mlp=64, hidden=64)


def decided(monkeypatch: pytest.MonkeyPatch, plan: str, layers: int) -> tuple[int, int]:
    """(operations decided, nodes of the program) of a model with so many layers."""
    spec = replace(WIDE, layers=layers, causal=(True,) * layers)
    module = build(spec)
    resolved = resolve(load_plan(plan))
    batch = inputs(spec, batch=4, seq=512)
    call = bind_call(signature_of(module.forward), (), batch, where="m", stateless=False)
    dims = classify_inputs(call, lambda name: None)
    count = 0
    original = assign._decide

    def counted(*args):
        nonlocal count
        count += 1
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(assign, "_decide", counted)
        program = build_program(Request(module, call, dims, sizes_of(call, dims), resolved, "p"))
    return count, len(program.flat.nodes)


@pytest.mark.parametrize("plan", ["usp_2x2", "megatron_sp_2", "data_2+ring_2+megatron_sp_2"])
def test_layers_are_placed_once(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    two, small = decided(monkeypatch, plan, 2)
    six, large = decided(monkeypatch, plan, 6)
    assert large > 2 * small
    assert six == two
    assert two < small


def test_ranks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    few = decided(monkeypatch, "data_2+ring_2+ulysses_2+megatron_sp_2", 2)
    many = decided(monkeypatch, "data_2+ring_64+ulysses_2+megatron_sp_2", 2)
    assert few == many
