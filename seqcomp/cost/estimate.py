"""The price of a plan: step time, memory, FLOPs and money on a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from seqcomp.cost.advice import does_not_fit
from seqcomp.cost.balance import BY_CAUSAL_MASKS, Busiest, busiest_of, uneven
from seqcomp.cost.ends import End
from seqcomp.cost.flops import CONVENTIONS, flops_of, tokens_of
from seqcomp.cost.group import Group
from seqcomp.cost.kernels import peak_of
from seqcomp.cost.layer import layer_of
from seqcomp.cost.memory import HeldRow, memory_rows, peak_bytes
from seqcomp.cost.outside import wanted_outputs
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.cost.timeline import Event, Timeline
from seqcomp.cost.unfused import dense_masks
from seqcomp.cost.widths import dtype_of, padded
from seqcomp.cost.workload import BlockSteps, Workload, workload_of
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.hardware.cluster import Cluster
from seqcomp.plan.resolve import ResolvedPlan


@dataclass(frozen=True)
class Estimate:
    """What one step costs.

    Seconds of one step: ``step_seconds`` is ``compute_seconds`` and ``exposed_seconds``, in which
    the device waits for communication; ``exposed`` splits these by mesh axis. ``timeline``: one
    layer of the first group, forward and then (training) backward. ``memory`` rows add up to
    ``peak_bytes`` of the ``capacity`` of one device, but for those in host memory. ``flops`` of
    all ranks, and ``mfu``, over the peak of all, by convention (`CONVENTIONS`). ``price`` of one
    step, in the unit of the price of a GPU hour; None without one. ``busiest``: of the ranks along
    a ring, those whose work and bytes are counted.
    """

    cluster: str
    model: str
    mesh: Mapping[str, int]
    run: Run
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    exposed: Mapping[str, float]
    timeline: tuple[Event, ...]
    memory: tuple[HeldRow, ...]
    peak_bytes: int
    capacity: int
    flops: Mapping[str, float]
    mfu: Mapping[str, float]
    tokens_per_second: float
    gpu_hours: float
    price: float | None
    findings: tuple[Diagnostic, ...]
    busiest: Busiest = field(default_factory=Busiest)

    @property
    def fits(self) -> bool:
        """Whether one rank's memory is enough."""
        return self.peak_bytes <= self.capacity

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values: the fields of this class, ``fits`` and the conventions."""
        return {
            "cluster": self.cluster,
            "model": self.model,
            "mesh": dict(self.mesh),
            "seq_len": self.run.seq_len,
            "batch": self.run.batch,
            "dtype": self.run.dtype,
            "mode": self.run.mode,
            "documents": None if self.run.packed is None else str(self.run.packed),
            "step_seconds": self.step_seconds,
            "compute_seconds": self.compute_seconds,
            "exposed_seconds": self.exposed_seconds,
            "exposed": dict(self.exposed),
            "timeline": [event.to_json() for event in self.timeline],
            "memory": [row.to_json() for row in self.memory],
            "peak_bytes": self.peak_bytes,
            "capacity": self.capacity,
            "fits": self.fits,
            "flops": dict(self.flops),
            "mfu": dict(self.mfu),
            "conventions": dict(CONVENTIONS),
            "tokens_per_second": self.tokens_per_second,
            "gpu_hours": self.gpu_hours,
            "price": self.price,
            "busiest": self.busiest.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
        }


def estimate(
    plan: ResolvedPlan,
    model: ModelShape,
    cluster: Cluster,
    run: Run,
    *,
    gpu_hour_price: float | None = None,
    advise: bool = True,
    work: Workload | None = None,
) -> Estimate:
    """What one step of ``run`` costs under a plan: no processes, no torch, under a millisecond.

    Equal blocks are computed once. The plan is taken to be legal for the model (``resolve`` with
    ``model.facts`` and the length). advise: where memory is not enough, look for the nearest change
    that makes it enough. work: what is sent (of the padded run), where that is not all of
    `workload_of`.

    Raises:
        PlanError: SC120 where the cluster has fewer GPUs than the plan has ranks, SC029 where its
            devices have no speed in the dtype, SC010 for a price that is none.
    """
    if gpu_hour_price is not None and not 0 <= gpu_hour_price < math.inf:
        raise PlanError(
            diagnostic("SC010", where="gpu_hour_price", found=gpu_hour_price, legal="0 or more")
        )
    if plan.world_size > cluster.gpus:
        raise PlanError(_too_many(plan, cluster))
    whole = padded(plan, model, run)
    sent = workload_of(plan, model, run) if work is None else work
    parts = tuple(_passes(plan, model, cluster, whole, sent))
    exposed: dict[str, float] = {}
    for count, timeline in parts:
        for axis, seconds in timeline.exposed.items():
            exposed[axis] = exposed.get(axis, 0.0) + count * seconds
    step = sum(count * timeline.now for count, timeline in parts)
    waiting = sum(exposed.values())
    rows = memory_rows(plan, model, run)
    peak = peak_bytes(rows)
    flops = flops_of(plan, model, run)
    most = peak_of(cluster.device, dtype_of(plan, run)[0]) * plan.world_size
    hours = step * plan.world_size / 3600
    findings = [*_of_plan(plan, run), *left_out(plan, model), *assumed(plan, model)]
    if advise:
        findings += [*uneven(plan, model, run), *dense_masks(plan, model, run)]
    if peak > cluster.device.memory and advise:
        findings.append(does_not_fit(plan, model, cluster, run, peak))
    return Estimate(
        cluster=cluster.name,
        model=model.name,
        mesh=MappingProxyType(dict(plan.axes)),
        run=run,
        step_seconds=step,
        compute_seconds=step - waiting,
        exposed_seconds=waiting,
        exposed=MappingProxyType(exposed),
        timeline=_one_layer(parts, trains=run.trains) if model.blocks else (),
        memory=rows,
        peak_bytes=peak,
        capacity=cluster.device.memory,
        flops=MappingProxyType(flops),
        mfu=MappingProxyType({name: n / (step * most) for name, n in flops.items()}),
        tokens_per_second=tokens_of(plan, run) / step,
        gpu_hours=hours,
        price=None if gpu_hour_price is None else hours * gpu_hour_price,
        findings=tuple(findings),
        busiest=busiest_of(plan, model, whole),
    )


def _passes(
    plan: ResolvedPlan, model: ModelShape, cluster: Cluster, run: Run, work: Workload
) -> Iterator[tuple[int, Timeline]]:
    """How often each timeline runs in a step: of each group forward and backward, and the ends."""
    group = Group(plan, cluster)
    contention = cluster.device.kernels.contention
    checkpoint = plan.plan.memory.checkpoint
    for block, steps in zip(model.blocks, work.blocks, strict=True):
        layer = layer_of(group, model, block, steps, run)
        forward = Timeline(contention)
        layer.forward(forward)
        _behind(group, forward, steps, "forward")
        yield block.count, forward
        if run.trains:
            backward = Timeline(contention)
            if checkpoint != "none":
                layer.again(backward, keeps=checkpoint == "selective")
            layer.backward(backward)
            _behind(group, backward, steps, "backward")
            yield block.count, backward
    ends = Timeline(contention)
    End(group, model, work, run).into(ends)
    yield 1, ends


def _behind(group: Group, into: Timeline, steps: BlockSteps, phase: str) -> None:
    own = [s for s in steps.parameters if s.phase == phase]
    group.behind(into, "the next block's parameters", [s for s in own if s.kind == "all_gather"])
    group.behind(into, "gradients of parameters", [s for s in own if s.kind != "all_gather"])


def _one_layer(parts: tuple[tuple[int, Timeline], ...], *, trains: bool) -> tuple[Event, ...]:
    """Of the first group; forward and then backward."""
    passes = [timeline for _, timeline in parts[: 2 if trains else 1]]
    at, found = 0.0, list[Event]()
    for timeline in passes:
        found += [Event(e.stream, e.what, e.start + at, e.end + at) for e in timeline.events]
        at += timeline.now
    return tuple(found)


def _of_plan(plan: ResolvedPlan, run: Run) -> Iterator[Diagnostic]:
    yield from (f for f in plan.findings if run.packed is None or f.code not in BY_CAUSAL_MASKS)


def left_out(plan: ResolvedPlan, model: ModelShape) -> Iterator[Diagnostic]:
    """SC417: what the plan says and the estimate takes no account of."""
    fsdp = plan.plan.strategies.fsdp
    offloads = plan.plan.memory.offload != "none" or (fsdp and fsdp.offload != "none")
    for left, why in (
        (offloads, "the time of copies to host memory and back"),
        (plan.plan.overrides, "overrides of modules"),
        (
            plan.plan.memory.loss_chunks > 1 and wanted_outputs(plan) == "full",
            "whole logits: beside them loss_chunks are refused (SC118), outputs: {logits: drop}",
        ),
        (
            model.by_tokens and plan.tensor_size > 1,
            f"how megatron_sp leaves whole, by tokens: {', '.join(model.by_tokens)}",
        ),
    ):
        if left:
            yield diagnostic("SC417", where=plan.plan.where(), message=f"not counted: {why}")


def assumed(plan: ResolvedPlan, model: ModelShape) -> Iterator[Diagnostic]:
    """SC427: how long the sequence of an encoder beside a decoder is taken to be."""
    if not model.source:
        return
    whole = any(b.source for b in model.blocks)
    idle = [a for a in (plan.ring_axis, plan.ulysses_axis) if a and plan.size(a) > 1]
    yield diagnostic(
        "SC427",
        where=model.name,
        message=f"the encoder has {model.source}"
        + (f"; every rank along {'+'.join(idle)} has all of them" if whole and idle else ""),
        help="--seq-len is the length of the decoder's sequence",
    )


def _too_many(plan: ResolvedPlan, cluster: Cluster) -> Diagnostic:
    return diagnostic(
        "SC120",
        where=plan.plan.where("mesh"),
        message=f"the plan has {plan.world_size} ranks, the cluster {cluster.name!r} "
        f"{cluster.gpus} GPUs",
        found=plan.world_size,
        legal=f"at most {cluster.gpus} ({cluster.max_nodes} x {cluster.gpus_per_node})",
        help="make an axis of mesh smaller",
    )
