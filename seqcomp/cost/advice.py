"""What to change where a plan does not fit in memory: computed, the nearest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from seqcomp.cost.memory import memory_rows, peak_bytes
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.cost.workload import outputs_of
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.hardware.cluster import Cluster
from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.plan.resolve import ResolvedPlan, resolve
from seqcomp.plan.schema import FsdpStrategy, OutputMode, Plan

Change = tuple[str, Plan]
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
        rows = memory_rows(resolved, model, replace(run, seq_len=length))
        return peak_bytes(rows) <= capacity

    for text, changed in _single(plan, run):
        if fits(changed):
            return text
    made, current = [], plan
    for find in _CUMULATIVE:
        change = find(current, run)
        if change is None:
            continue
        text, changed = change
        made.append(text)
        if fits(changed):
            return " and ".join(made)
        resolved = _resolved(changed, model, run.seq_len)
        current = current if resolved is None else resolved
    wider = _wider(current.plan, plan, cluster, fits)
    if wider:
        return " and ".join([*made, wider])
    shorter = _shorter(current, run, fits)
    if shorter:
        return " and ".join([*made, f"a length of {shorter}"])
    return "no length fits: more GPUs that share the parameters (fsdp, megatron_sp), or larger ones"


def _resolved(plan: Plan, model: ModelShape, length: int) -> ResolvedPlan | None:
    try:
        return resolve(plan, model.facts, seq_len=length)
    except PlanError:
        return None


# --- one change each -------------------------------------------------------------------------


def _outputs(plan: ResolvedPlan, run: Run) -> Change | None:
    if not run.trains or outputs_of(plan) != "full":
        return None
    return "outputs: {logits: drop}", plan.plan.model_copy(update={"outputs": _DROPPED})


def _selective(plan: ResolvedPlan, run: Run) -> Change | None:
    if not run.trains or plan.plan.memory.checkpoint != "none":
        return None
    return "memory: {checkpoint: selective}", _with_memory(plan.plan, checkpoint="selective")


def _block(plan: ResolvedPlan, run: Run) -> Change | None:
    if not run.trains or plan.plan.memory.checkpoint == "block":
        return None
    return "memory: {checkpoint: block}", _with_memory(plan.plan, checkpoint="block")


def _chunks(plan: ResolvedPlan, run: Run) -> Change | None:
    if not run.trains or plan.plan.memory.loss_chunks > 1:
        return None
    changed = _with_memory(plan.plan, loss_chunks=8)
    text = "memory: {loss_chunks: 8} with outputs: {logits: drop}"
    return text, changed.model_copy(update={"outputs": _DROPPED})


def _fsdp(plan: ResolvedPlan, run: Run) -> Change | None:
    del run
    others = [a for a, n in plan.axes.items() if n > 1 and a != plan.tensor_axis]
    if plan.fsdp_axes or not others:
        return None
    strategies = plan.plan.strategies.model_copy(update={"fsdp": FsdpStrategy()})
    return "strategies: {fsdp: {}}", plan.plan.model_copy(update={"strategies": strategies})


def _with_memory(plan: Plan, **update: object) -> Plan:
    return plan.model_copy(update={"memory": plan.memory.model_copy(update=update)})


_CHANGES: tuple[Callable[[ResolvedPlan, Run], Change | None], ...] = (
    _outputs, _selective, _block, _chunks, _fsdp,
)  # fmt: skip
_CUMULATIVE = (_fsdp, _chunks, _block)


def _single(plan: ResolvedPlan, run: Run) -> Iterator[Change]:
    for find in _CHANGES:
        change = find(plan, run)
        if change is not None:
            yield change


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


def _shorter(plan: ResolvedPlan, run: Run, fits: Callable[[Plan, int], bool]) -> int | None:
    """The longest length that fits, to three binary digits."""
    factor = 2 * plan.sequence_size
    low, high = 0, run.seq_len // factor
    while high - low > max(1, high // 8):
        middle = (low + high) // 2
        if fits(plan.plan, middle * factor):
            low = middle
        else:
            high = middle
    return low * factor or None
