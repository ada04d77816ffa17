"""`seqcomp.verify` on real processes; functions are importable, so that the ranks can."""

from __future__ import annotations

import pytest
from torch import nn

import seqcomp
from seqcomp.lowering import ops
from tests.fixtures import plans
from tests.fixtures.models import M0, build, inputs

pytestmark = pytest.mark.distributed


def build_with_a_fault() -> nn.Module:
    """In the process that calls it, sums over ranks are forgotten."""
    ops.AllReduce.bind = lambda self, rank: lambda x: x.clone()
    return build()


def broken_on_one_rank() -> nn.Module:
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() == 1:
        raise ZeroDivisionError("rank 1 only")
    return build()


def test_right_plans_are_equal() -> None:
    steps = []
    report = seqcomp.verify(
        build,
        plans.megatron(2),
        inputs_fn=inputs,
        backend="gloo",
        timeout=120,
        progress=lambda *step: steps.append(step),
    )
    assert report.ok, str(report)
    assert (report.backend, report.ranks) == ("gloo", 2)
    assert 0 < report.max_grad_rel < 1e-12
    assert steps[-1][1] <= steps[-1][2]


def test_sharded_parameters_are_compared_whole() -> None:
    plan = plans.with_fsdp(plans.with_data(plans.megatron(2), 2))
    report = seqcomp.verify(build, plan, inputs_fn=inputs, backend="gloo", timeout=120)
    assert report.ok, str(report)
    assert not report.not_shown
    assert 0 < report.max_grad_rel < 1e-12


def test_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.AllReduce, "bind", ops.AllReduce.bind)  # put back afterwards
    report = seqcomp.verify(
        build_with_a_fault, plans.ring(2), inputs_fn=inputs, backend="gloo", timeout=120
    )
    assert not report.ok
    assert report.first_divergence is not None
    assert report.first_divergence.phase == "forward"
    assert "output loss" in report.first_divergence.op


def test_failures_are_the_callers() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: rank 1 only"):
        seqcomp.verify(
            broken_on_one_rank, plans.ring(2), inputs_fn=inputs, backend="gloo", timeout=60
        )
    with pytest.raises(seqcomp.PlanError, match="SC025"):
        seqcomp.verify(lambda: build(M0), plans.ring(2), inputs_fn=inputs, backend="gloo")
