"""`seqcomp.verify`: right plans are equal, and a fault is found where it was put."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

import seqcomp
from seqcomp.capture import recognise
from seqcomp.layout.masks import Full
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.lowering import build as lowering_build
from seqcomp.lowering import ops
from seqcomp.lowering.context import Pass
from seqcomp.verify.diverging import first_divergence
from seqcomp.verify.jobs import TraceValues
from seqcomp.verify.lockstep import lockstep
from seqcomp.verify.observe import seeded
from tests.fixtures import plans
from tests.fixtures.models import M0, Spec, build, inputs

RIGHT = [
    plans.ring(2, "zigzag"),
    plans.usp(2, 2, "striped"),
    plans.megatron(2),
    plans.with_data(plans.ring(2), 2),
    plans.with_tensor(plans.ring(2, "zigzag"), 2),
]


@pytest.mark.parametrize("plan", RIGHT, ids=str)
def test_right_plans_are_equal(plan) -> None:
    steps = []
    report = seqcomp.verify(
        build, plan, inputs_fn=inputs, progress=lambda *step: steps.append(step)
    )
    assert report.ok, str(report)
    assert report.first_divergence is None
    assert 0 < report.max_grad_rel < 1e-12
    assert report.worst_parameter in dict(build().named_parameters())
    assert report.precision == "fp64"
    assert json.loads(json.dumps(report.to_json()))["ok"] is True
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)
    assert len(steps) == report.ranks + 2


@pytest.mark.parametrize("with_labels", [True, False], ids=["loss", "logits"])
def test_averaged_gradients_are_compared_as_what_they_are(*, with_labels: bool) -> None:
    """A loss of the model is never averaged; contributions of data ranks are."""
    plan = plans.with_data(plans.ring(2), 2)
    mean = {**plan, "strategies": {**plan["strategies"], "data": {"gradients": "mean"}}}
    report = seqcomp.verify(build, mean, inputs_fn=partial(inputs, with_labels=with_labels))
    assert report.ok, str(report)


def test_what_ranks_that_are_threads_do_not_show_is_said() -> None:
    report = seqcomp.verify(build, plans.with_fsdp(plans.ring(2)), inputs_fn=inputs)
    assert report.ok, str(report)
    assert "not shown: sharded parameters" in str(report)
    assert "not shown" not in str(seqcomp.verify(build, plans.ring(2), inputs_fn=inputs))


@pytest.mark.parametrize("plan", RIGHT, ids=str)
def test_every_value_and_cotangent_of_right_plans_agrees(plan) -> None:
    """The search itself reports nothing on right programs, and it has looked at everything."""
    shapes = {n: tuple(x.shape) for n, x in build()(**inputs()).items()}
    job = TraceValues(shapes, build, inputs)
    ranks = lockstep(lambda: seeded(build), plan, job, inputs=inputs(), keep_global=True)
    whole = ranks[0].whole
    assert whole is not None
    assert first_divergence(ranks, whole, 1e-9) is None
    seen = {traced.source for traced in whole.traced.values()}
    compute = {o.name for o in whole.operations if o.op in ("aten.linear", "attention")}
    assert compute, "the model has linears"
    assert compute <= seen
    assert compute <= set(whole.trace.gradients)
    # Redistributions are compared too.
    assert any(traced.moved for traced in whole.traced.values())


def test_tied_and_unevenly_cut_weights_are_compared_by_all_of_their_names() -> None:
    tied = partial(build, Spec(tied=True))
    shapes = {n: tuple(x.shape) for n, x in tied()(**inputs()).items()}
    report = seqcomp.verify(tied, plans.megatron(2), inputs_fn=inputs)
    assert report.ok, str(report)
    job = TraceValues(shapes, tied, inputs)
    ranks = lockstep(
        partial(seeded, tied), plans.megatron(2), job, inputs=inputs(), keep_global=True
    )
    whole = ranks[0].whole
    assert whole is not None
    assert first_divergence(ranks, whole, 1e-9) is None


def _no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.AllReduce, "bind", lambda self, rank: lambda x: x.clone())


def _no_scattered_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(self, rank):
        return ops.Shard(self.dim, self.axes).bind(rank)

    monkeypatch.setattr(ops.ReduceScatter, "bind", bind)


def _wrong_group(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ops.OpenBucket.bind

    def bind(self, rank):
        return original(replace(self, axes=self.axes[:1]), rank)

    monkeypatch.setattr(ops.OpenBucket, "bind", bind)


def _other_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ops.Attention.bind

    def bind(self, rank):
        layout = SequenceLayout("contiguous", rank.layout.ring, rank.layout.inner)
        return original(self, replace(rank, layout=layout))

    monkeypatch.setattr(ops.Attention, "bind", bind)


def _replicated_cotangent(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ops.Gather.bind

    def bind(self, rank):
        return original(replace(self, cotangent="replicated"), rank)

    monkeypatch.setattr(ops.Gather, "bind", bind)


def _shifted_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(graph, context):
        for node in graph.nodes:
            if node.target in (torch.ops.aten.arange.default, torch.ops.aten.arange.start_step):
                with graph.inserting_after(node):
                    late = graph.call_function(torch.ops.aten.add.Tensor, (node, 1))
                late.meta = {"nn_module_stack": node.meta["nn_module_stack"]}
                node.replace_all_uses_with(late, delete_user_cb=lambda u: u is not late)
                context.replaced(node, late)
        return graph

    passes = (*lowering_build.PASSES, Pass("shift", shift))
    monkeypatch.setattr(lowering_build, "PASSES", passes)


def _lost_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognise, "_read_mask", lambda *_: (Full(), ""))


FAULTS = {
    "a missing sum of the loss": (_no_sum, plans.ring(2), "forward", "", "output loss of"),
    "a missing sum over the tensor axis": (
        _no_scattered_sum,
        plans.megatron(2),
        "forward",
        "emb",
        "reduce_scatter of aten.embedding",
    ),
    "a sum over the wrong group": (
        _wrong_group,
        plans.with_tensor(plans.ring(2), 2),
        "backward",
        "norm",
        "weight",
    ),
    "a wrong layout in attention": (
        _other_layout,
        plans.ring(2, "zigzag"),
        "forward",
        "layers.0.attn",
        "attention",
    ),
    "a missing sum in backward": (
        _replicated_cotangent,
        plans.megatron(2),
        "backward",
        "",
        "",
    ),
    "shifted positions": (_shifted_positions, plans.ring(2), "forward", "", "aten.arange"),
    "a lost mask": (_lost_mask, plans.ring(2), "capture", "layers.0.attn", "aten.linear"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_where_they_are(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, plan, phase, module, op = FAULTS[fault]
    inject(monkeypatch)
    # Rotary positions are relative: a shift of all of them changes nothing.
    spec = Spec(positions="learned") if "positions" in fault else M0
    report = seqcomp.verify(lambda: build(spec), plan, inputs_fn=inputs)
    assert not report.ok
    first = report.first_divergence
    assert first is not None, str(report)
    assert first.phase == phase, str(first)
    assert module in first.module, str(first)
    assert op in first.op, str(first)
    assert first.relative > 1e-6
    assert first.expected != first.found
    assert str(first) in str(report)
