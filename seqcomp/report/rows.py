"""Rows of a report: what one rank sends in one call, and which kernel each attention uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from seqcomp.capture.facts import mask_name
from seqcomp.capture.recognise import AttentionInfo
from seqcomp.layout.neighbours import neighbours
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.layout.travel import travel_of
from seqcomp.lowering import ops
from seqcomp.lowering.program import Program
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.report.memory import Again
from seqcomp.report.sharded import fsdp_steps
from seqcomp.runtime.attention import kernels
from seqcomp.strategies.base import AttentionShape, Kind, Phase
from seqcomp.strategies.compose import attention_steps

# Operations over a group that send nothing.
_SILENT = (
    ops.Shard, ops.OwnCotangent, ops.SumGradient, ops.VocabularyEmbedding, ops.OwnHeads,
    ops.PadPart, ops.Part, ops.HidePadding, ops.TokensAt, ops.ScaleCotangent,
)  # fmt: skip


@dataclass(frozen=True)
class CommRow:
    """`count` collectives of one kind from one place, and what one rank sends in all of them.

    `module` is the path of the module that needs the value, "gradients" for the sums of those of
    parameters, or the name of an input or output. `axis` joins the mesh axes of the group with "+".
    `bytes_sent` is logical payload in bytes, the rank's own part excluded (an all-reduce counts
    as reduce-scatter and all-gather). Where `at_most`, a mask decides call by call, or the rank's
    place in the sequence, how much of that is needed, and no more is sent.
    """

    module: str
    kind: Kind
    axis: str
    count: int
    bytes_sent: int
    phase: Phase
    overlappable: bool
    at_most: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class KernelRow:
    """How one attention runs on one rank.

    `kernel` computes full and causal tiles, others take `math`; "sdpa" is torch's own choice,
    where no axis divides the attention, "fused" any that the device of the calls will have (meta).
    `heads` and `kv_heads` are the layer's.
    """

    module: str
    kernel: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    mask: str
    layout: str
    transport: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Event:
    """What one operation `node` of the local graph sends; "" for what FSDP does around modules."""

    node: str
    row: CommRow

    def to_json(self) -> dict[str, Any]:
        return {"node": self.node, **self.row.to_json()}


def comm_events(
    program: Program,
    values: Mapping[Node, Any],
    resolved: ResolvedPlan,
    again: Again,
    ring_rank: int = 0,
) -> tuple[Event, ...]:
    """Everything that one rank sends in a call and its backward, in the order of the forward.

    values: as from `local_values`. again: what runs again in backward. ring_rank: the rank's place
    along the ring. Backward rows suppose that every output takes part in the loss.
    """
    found: list[Event] = []
    for node in program.flat.nodes:
        rows: list[CommRow] = []
        if isinstance(node.target, ops.Attention):
            layout = program.layout
            rows.extend(_attention(node, node.target, values, resolved, layout, ring_rank))
        elif isinstance(node.target, ops.Windowed | ops.RunningSum):
            rows.extend(_along(node, node.target, values, resolved, program.layout))
        elif isinstance(node.target, ops.TokenLocal):
            rows.extend(_counts(node.target, resolved))
        elif isinstance(node.target, ops.Op):
            rows.extend(_rows_of(node, node.target, values, resolved))
        # A second run gathers once, for itself and for the weight gradients.
        if not (isinstance(node.target, ops.Remember) and again.inside(node)):
            found.extend(Event(node.name, row) for row in rows)
        if again.sends(node):
            forward = (row for row in rows if row.phase == "forward")
            found.extend(Event(node.name, replace(row, phase="backward")) for row in forward)
    found.extend(
        Event("", CommRow(label, s.kind, s.axis, s.count, s.bytes_sent, s.phase, s.overlappable))
        for label, s in fsdp_steps(program, values, resolved)
    )
    return tuple(found)


def comm_rows(events: Iterable[Event]) -> tuple[CommRow, ...]:
    """Equal kinds of one place as one row, in the order of the forward."""
    return tuple(_merged(event.row for event in events))


def kernel_rows(
    program: Program,
    values: Mapping[Node, Any],
    resolved: ResolvedPlan,
    device: torch.device,
) -> tuple[KernelRow, ...]:
    """One row for each attention, in the order of the forward."""
    rows = []
    for node in program.flat.nodes:
        info: AttentionInfo | None = node.meta.get("attention")
        if info is None:
            continue
        q, _, v = _operands(node, values)[:3]
        dtype, op = values[node].dtype, node.target
        divided = isinstance(op, ops.Attention)
        rows.append(
            KernelRow(
                module=info.where,
                kernel=_kernel(info, device, dtype, q, v, divided=divided),
                dtype=str(dtype).removeprefix("torch."),
                heads=info.heads,
                kv_heads=info.kv_heads,
                head_dim=q.shape[3],
                mask=mask_name(info),
                layout=program.layout.kind,
                transport=op.transport
                if divided and not op.whole and resolved.ring_size > 1
                else "none",
            )
        )
    return tuple(rows)


def _kernel(
    info: AttentionInfo,
    device: torch.device,
    dtype: torch.dtype,
    q: Tensor,
    v: Tensor,
    *,
    divided: bool,
) -> str:
    if not divided:
        return "math" if info.written else "sdpa"
    if info.dropout or info.softcap:
        return "math"
    if device.type == "meta":
        return "fused" if q.shape[3] == v.shape[3] else "math"
    return kernels.choose(device, dtype, q.shape[3], v.shape[3])


def _rows_of(
    node: Node, op: ops.Op, values: Mapping[Node, Any], resolved: ResolvedPlan
) -> Iterator[CommRow]:
    degree = math.prod(resolved.axes[axis] for axis in op.axes_used())
    if degree == 1:
        return
    axis = "+".join(op.axes_used())
    if isinstance(op, ops.OpenBucket | ops.FillBucket):
        yield from _bucket(op, values[node], degree, axis)
        return
    named = op.shared if isinstance(op, ops.ChunkedLoss) else None
    operand: Tensor = _operands(node, values)[0]
    size = operand.numel() * operand.element_size()
    backward = values[node].requires_grad

    def row(kind: Kind, sent: int, phase: Phase, *, overlappable: bool = False) -> CommRow:
        label: str = op.label if named is None else named.label  # type: ignore[attr-defined]
        return CommRow(label, kind, axis, 1, sent, phase, overlappable)

    match op:
        case ops.Gather():
            yield row("all_gather", (degree - 1) * size, "forward")
            if backward and op.cotangent == "partial":
                yield row("reduce_scatter", (degree - 1) * size, "backward")
        case ops.ReduceScatter():
            own = values[node].numel() * values[node].element_size()
            yield row("reduce_scatter", own * (degree - 1), "forward")
            if backward:
                yield row("all_gather", own * (degree - 1), "backward")
        case ops.AllToAll():
            yield row("all_to_all", size // degree * (degree - 1), "forward")
            if backward:
                yield row("all_to_all", size // degree * (degree - 1), "backward")
        case ops.Remember() | ops.VocabularyLoss() | ops.ChunkedLoss():
            for kind, sent, phase in _tensor_parallel(node, op, operand, values, degree):
                yield row(kind, sent, phase)
        case ops.AllReduce():
            yield row("all_reduce", 2 * (degree - 1) * size // degree, "forward")
            if backward and op.cotangent == "partial":
                yield row("all_reduce", 2 * (degree - 1) * size // degree, "backward")
        case ops.SumGradient() if backward and _is_differentiated(node, values):
            # Gradients narrower than fp32 are added up in fp32.
            wide = operand.numel() * max(operand.element_size(), 4)
            sent = 2 * (degree - 1) * wide // degree
            yield row("all_reduce", sent, "backward", overlappable=True)
        case _:
            assert isinstance(op, _SILENT), f"the report does not know what {op} sends"


def _counts(op: ops.TokenLocal, resolved: ResolvedPlan) -> Iterator[CommRow]:
    """What ranks count of their own tokens, added up."""
    degree = math.prod(resolved.axes[axis] for axis in op.axes_used())
    for _, size in op.unit.counters if degree > 1 else ():
        sent = 2 * (degree - 1) * size // degree
        yield CommRow(op.label, "all_reduce", "+".join(op.axes_used()), 1, sent, "forward", False)


def _is_differentiated(node: Node, values: Mapping[Node, Any]) -> bool:
    """Whether an output depends on it through more than indices and comparisons."""
    waiting, seen = [node], set[Node]()
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output":
                return True
            made = values.get(user)
            parts = made if isinstance(made, tuple | list) else (made,)
            if user not in seen and any(isinstance(x, Tensor) and x.requires_grad for x in parts):
                seen.add(user)
                waiting.append(user)
    return False


def _bucket(
    op: ops.OpenBucket | ops.FillBucket, members: tuple[Tensor, ...], degree: int, axis: str
) -> Iterator[CommRow]:
    """One sum of all gradients, in fp32 where they are narrower."""
    wide = sum(m.numel() * max(m.element_size(), 4) for m in members if m.requires_grad)
    if isinstance(op, ops.FillBucket) and wide:
        sent = 2 * (degree - 1) * wide // degree
        yield CommRow(op.label, "all_reduce", axis, 1, sent, "backward", True)


def _tensor_parallel(
    node: Node,
    op: ops.Remember | ops.VocabularyLoss | ops.ChunkedLoss,
    operand: Tensor,
    values: Mapping[Node, Any],
    degree: int,
) -> Iterator[tuple[Kind, int, Phase]]:
    """What Megatron-SP sends besides its gathers and scatters, as (kind, bytes, phase)."""
    size = operand.numel() * operand.element_size()
    if isinstance(op, ops.Remember):
        if any(_asks_again(user, values) for user in node.users):
            yield "all_gather", (degree - 1) * size, "backward"
        return
    if isinstance(op, ops.ChunkedLoss):
        target: Any = node.args[5]
        tokens, element = values[target].numel(), op.dtype.itemsize
    else:
        tokens = operand.numel() // operand.shape[op.classes if operand.dim() > 1 else 0]
        element = operand.element_size()
    wide = tokens * max(element, 4)
    yield "all_reduce", 2 * (degree - 1) * wide // degree, "forward"
    yield "all_reduce", 2 * (degree - 1) * 2 * wide // degree, "forward"
    if values[node].requires_grad:
        narrow = tokens * element
        yield "all_reduce", 2 * (degree - 1) * narrow // degree, "backward"


def _asks_again(user: Node, values: Mapping[Node, Any]) -> bool:
    """Whether the gradients of `user` need its gathered input."""
    if isinstance(user.target, ops.ChunkedLoss | ops.ChunkedMlp):
        return bool(values[user].requires_grad)
    return bool(_operands(user, values)[2].requires_grad)


def _along(
    node: Node,
    op: ops.Windowed | ops.RunningSum,
    values: Mapping[Node, Any],
    resolved: ResolvedPlan,
    layout: SequenceLayout,
) -> Iterator[CommRow]:
    """What operations along the sequence send; of neighbours, what the busiest rank sends."""
    x: Tensor = _operands(node, values)[0]
    dim = op.window.dim if isinstance(op, ops.Windowed) else op.dim
    sequence = tuple(a for a in resolved.sequence_axes if resolved.axes[a] > 1)
    place = ops.Place(resolved.axes, {}, sequence, layout, resolved.ring_axis)
    dealt = place.layout_over(op.axes)
    degree = math.prod(resolved.axes[a] for a in op.axes)
    dealt = dealt or SequenceLayout("contiguous", degree)
    length, row = x.shape[dim] * degree, x.numel() // x.shape[dim]
    axis, backward = "+".join(op.axes), values[node].requires_grad
    phases: tuple[Phase, ...] = ("forward", "backward") if backward else ("forward",)
    if isinstance(op, ops.RunningSum):
        size = row * max(values[node].element_size(), 4)
        most = max(len(dealt.ranges(length, rank)) for rank in range(degree))
        for phase in phases:
            yield CommRow(op.label, "all_gather", axis, 1, (degree - 1) * most * size, phase, False)
        return
    window = op.window
    plan = neighbours(dealt, length, window.low, window.high, window.fill is None)
    ranks = range(degree)
    received = [sum(plan.count(rank, other) for other in ranks) for rank in ranks]
    for phase in phases:
        if plan.travels:
            most = max(received if phase == "backward" else map(plan.sent, ranks))
            sent = most * row * x.element_size()
            yield CommRow(op.label, "all_to_all", axis, 1, sent, phase, False, at_most=True)


def _attention(
    node: Node,
    op: ops.Attention,
    values: Mapping[Node, Any],
    resolved: ResolvedPlan,
    layout: SequenceLayout,
    ring_rank: int,
) -> Iterator[CommRow]:
    if op.whole:
        return
    q, k, v = _operands(node, values)[:3]
    element = values[node].element_size()
    shape = AttentionShape(
        batch=q.shape[0],
        length=q.shape[2] * resolved.ring_size * resolved.ulysses_size,
        heads=q.shape[1] * resolved.tensor_size,
        kv_heads=k.shape[1] * resolved.tensor_size,
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        element_bytes=element,
        accumulator_bytes=max(element, 4),
    )
    travel = travel_of(op.mask, layout, shape.length) if op.mask is not None else None
    for step in attention_steps(resolved, shape, op.label, travel, ring_rank):
        if step.phase == "forward" or values[node].requires_grad:
            yield CommRow(
                op.label, step.kind, step.axis, step.count, step.bytes_sent, step.phase,
                step.overlappable, at_most=op.mask is None and step.axis == resolved.ring_axis,
            )  # fmt: skip


def _operands(node: Node, values: Mapping[Node, Any]) -> list[Any]:
    return [values[item] for item in node.args if isinstance(item, Node)]


def _merged(rows: Iterable[CommRow]) -> Iterator[CommRow]:
    """Equal kinds of one place are one row."""
    total: dict[tuple[Any, ...], tuple[int, int]] = {}
    for row in rows:
        key = (row.module, row.kind, row.axis, row.phase, row.overlappable, row.at_most)
        count, sent = total.get(key, (0, 0))
        total[key] = (count + row.count, sent + row.bytes_sent)
    for (module, kind, axis, phase, overlappable, at_most), (count, sent) in total.items():
        yield CommRow(module, kind, axis, count, sent, phase, overlappable, at_most)
