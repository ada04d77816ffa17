"""A part of a step alone, as benchmarks measure it: attention, or one block."""

from __future__ import annotations

from dataclasses import replace

from seqcomp.cost.group import Group
from seqcomp.cost.layer import Layer, layer_of
from seqcomp.cost.rounds import Rounds
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.cost.timeline import Timeline
from seqcomp.cost.workload import workload_of
from seqcomp.hardware.cluster import Cluster
from seqcomp.plan.resolve import ResolvedPlan


def attention_timeline(
    plan: ResolvedPlan,
    model: ModelShape,
    cluster: Cluster,
    run: Run,
    rounds: Rounds | None = None,
) -> Timeline:
    """Of one layer of the first group, q, k and v to output and (training) back.

    rounds: its work, where that is not what the run says.
    """
    layer = replace(_layer(plan, model, cluster, run), rounds=rounds)
    timeline = Timeline(cluster.device.kernels.contention)
    layer.attention(timeline, "forward")
    if run.trains:
        layer.attention(timeline, "backward")
    return timeline


def block_timelines(
    plan: ResolvedPlan, model: ModelShape, cluster: Cluster, run: Run
) -> tuple[Timeline, Timeline]:
    """Of one block of the first group, forward and backward, without what its parameters send.

    Backward includes what a checkpoint runs again.
    """
    layer = _layer(plan, model, cluster, run)
    contention = cluster.device.kernels.contention
    forward, backward = Timeline(contention), Timeline(contention)
    layer.forward(forward)
    checkpoint = plan.plan.memory.checkpoint
    if checkpoint != "none":
        layer.again(backward, keeps=checkpoint == "selective")
    layer.backward(backward)
    return forward, backward


def _layer(plan: ResolvedPlan, model: ModelShape, cluster: Cluster, run: Run) -> Layer:
    steps = workload_of(plan, model, run).blocks[0]
    return layer_of(Group(plan, cluster), model, model.blocks[0], steps, run)
