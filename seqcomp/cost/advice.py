"""What to change where a plan does not fit in memory: computed, the nearest first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from seqcomp.cost.changes import Setting, as_yaml
from seqcomp.cost.memory import memory_rows, peak_bytes
from seqcomp.cost.outside import outputs_of
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.hardware.cluster import Cluster
from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.plan.resolve import ResolvedPlan, resolve
from seqcomp.plan.schema import FsdpStrategy, OutputMode, Plan

Change = tuple[Setting, Plan]
_DROPPED: FrozenMap[OutputMode] = FrozenMap([("logits", "drop")])


def does_not_fit(
    plan: ResolvedPlan, model: ModelShape, cluster: Cluster, run: Run, peak: int
) -> Diagnostic:
    """SC121, with the fewest changes that make the plan fit, or the longest length that does."""
    capacity = cluster.device.memory
    gib = 2**30
    return diagnostic(
        "SC121",
        where=plan.plan.where(),
        message=f"one rank holds {peak / gib:.1f} GiB, {(peak - capacity) / gib:.1f} GiB more than "
        f"{cluster.device.name} has",
        found=f"{peak / gib:.1f} GiB",
        legal=f"at most {capacity / gib:.1f} GiB",
        help=_help(plan, model, cluster, run),
    )


def _help(plan: ResolvedPlan, model: ModelShape, cluster: Cluster, run: Run) -> str:
    capacity = cluster.device.memory

    def fits(changed: Plan, length: int = run.seq_len) -> bool:
        resolved = _resolved(changed, model, length)
        if resolved is None or resolved.world_size > cluster.gpus:
            return False
        rows = memory_rows(resolved, model, run.with_length(length))
        return peak_bytes(rows) <= capacity

    texts, most = list[Setting](), plan.plan
    for count in range(1, len(_CHANGES) + 1):
        for finds in itertools.combinations(_CHANGES, count):
            made = _made(finds, plan, run)
            if made is None:
                continue
            texts, most = made
            if fits(most):
                return as_yaml(texts)
    wider = _wider(most, plan, cluster, fits)
    if wider:
        return " and ".join(filter(None, (as_yaml(texts), wider)))
    shorter = _shorter(most, plan, run, fits)
    if shorter:
        return " and ".join(filter(None, (as_yaml(texts), f"a length of {shorter}")))
    return "no length fits: more GPUs that share the parameters (fsdp, megatron_sp), or larger ones"


def _made(
    finds: Sequence[Callable[[Plan, ResolvedPlan, Run], Change | None]],
    plan: ResolvedPlan,
    run: Run,
) -> tuple[list[Setting], Plan] | None:
    """Several changes in turn; None where one changes nothing."""
    texts, changed = list[Setting](), plan.plan
    for find in finds:
        change = find(changed, plan, run)
        if change is None:
            return None
        texts.append(change[0])
        changed = change[1]
    return texts, changed


def _resolved(plan: Plan, model: ModelShape, length: int) -> ResolvedPlan | None:
    try:
        return resolve(plan, model.facts, seq_len=length)
    except PlanError:
        return None


# --- one change each: None where it changes nothing ------------------------------------------


def _outputs(changed: Plan, plan: ResolvedPlan, run: Run) -> Change | None:
    if not run.trains or outputs_of(plan) != "full":
        return None
    return ("outputs", "logits: drop"), changed.model_copy(update={"outputs": _DROPPED})


def _selective(changed: Plan, plan: ResolvedPlan, run: Run) -> Change | None:
    del plan
    if not run.trains or changed.memory.checkpoint != "none":
        return None
    return ("memory", "checkpoint: selective"), _with_memory(changed, checkpoint="selective")


def _block(changed: Plan, plan: ResolvedPlan, run: Run) -> Change | None:
    if not run.trains or changed.memory.checkpoint != plan.plan.memory.checkpoint:
        return None
    if changed.memory.checkpoint == "block":
        return None
    return ("memory", "checkpoint: block"), _with_memory(changed, checkpoint="block")


def _chunks(changed: Plan, plan: ResolvedPlan, run: Run) -> Change | None:
    dropped = outputs_of(plan) == "drop" or changed.outputs == _DROPPED
    if not run.trains or not dropped or changed.memory.loss_chunks > 1:
        return None
    return ("memory", "loss_chunks: 8"), _with_memory(changed, loss_chunks=8)


def _fsdp(changed: Plan, plan: ResolvedPlan, run: Run) -> Change | None:
    del run
    others = [a for a, n in plan.axes.items() if n > 1 and a != plan.tensor_axis]
    if plan.fsdp_axes or not others:
        return None
    strategies = changed.strategies.model_copy(update={"fsdp": FsdpStrategy()})
    return ("strategies", "fsdp: {}"), changed.model_copy(update={"strategies": strategies})


def _with_memory(plan: Plan, **update: object) -> Plan:
    return plan.model_copy(update={"memory": plan.memory.model_copy(update=update)})


_CHANGES = (_outputs, _selective, _block, _chunks, _fsdp)


# --- more GPUs, shorter sequences ------------------------------------------------------------


def _wider(
    plan: Plan, original: ResolvedPlan, cluster: Cluster, fits: Callable[[Plan], bool]
) -> str | None:
    """The smallest doubling of an axis that suffices: ring, or the outermost."""
    axis = original.ring_axis or next(iter(original.axes))
    size = original.axes[axis]
    factor = 2
    while original.world_size * factor <= cluster.gpus:
        mesh = {**plan.mesh, axis: size * factor}
        if fits(plan.model_copy(update={"mesh": type(plan.mesh)(mesh)})):
            ranks = original.world_size * factor
            return f"mesh.{axis}: {size * factor} ({ranks} GPUs)"
        factor *= 2
    return None


def _shorter(
    plan: Plan, original: ResolvedPlan, run: Run, fits: Callable[[Plan, int], bool]
) -> int | None:
    """The longest length that fits, to three binary digits."""
    factor = 2 * original.sequence_size
    low, high = 0, run.seq_len // factor
    while high - low > max(1, high // 8):
        middle = (low + high) // 2
        if fits(plan, middle * factor):
            low = middle
        else:
            high = middle
    return low * factor or None
