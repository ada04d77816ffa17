"""What one rank holds: parameters, gradients, optimizer state, activations, logits, in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from seqcomp.capture.edit import op_name
from seqcomp.layout.parts import part_size
from seqcomp.lowering import ops
from seqcomp.lowering.fsdp_units import owner
from seqcomp.lowering.program import Program
from seqcomp.lowering.sharded import PRECISIONS, sharding_axes
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.report.local import Saved
from seqcomp.report.memory import saved_bytes
from seqcomp.report.sharded import name_of, parameters_of, shard_size

Values = Mapping[Node, Any]
_LINEARS = ("aten.linear", "aten.matmul", "aten.mm", "aten.addmm", "aten.bmm")
_STEP = 4  # bytes: AdamW counts the steps of each parameter by itself, in fp32


@dataclass(frozen=True)
class FootprintRow:
    """Bytes of one kind on one rank, the largest where ranks differ.

    `formula`: the bytes follow from a rule that `note` names; the others are those of the tensors
    of the local graph. `at_least`: a unit that runs untraced saves more than is known. `on_host`:
    in host memory. Rows may share tensors: logits and outputs that are saved are in both.
    """

    what: str
    bytes: int
    formula: bool
    note: str = ""
    at_least: bool = False
    on_host: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def footprint_rows(
    program: Program,
    values: Values,
    saved: Saved,
    resolved: ResolvedPlan,
    dtypes: Mapping[str, torch.dtype],
    *,
    on_host: bool,
) -> tuple[FootprintRow, ...]:
    """Rows of a training step with AdamW; of a call without gradients only what it has.

    values, saved: as from `local_values`. dtypes: in which parameters are kept, by name, where
    that is not how they compute (mixed precision). on_host: whether `offload` has somewhere to
    move to.
    """
    rows = list(_state_rows(program, values, resolved, dtypes, on_host=on_host))
    if program.grad:
        held = saved_bytes(program, values, saved, resolved)
        note = "what autograd holds when the forward ends"
        if any(isinstance(n.target, ops.TokenLocal) for n in program.flat.nodes):
            note += "; inside of units by the token, wherever it is routed"
        kept_on_host = on_host and bool(program.checkpoints)
        rows.append(
            FootprintRow(
                "saved activations",
                held.kept,
                False,
                note,
                held.at_least,
                kept_on_host and resolved.plan.memory.offload == "cpu",
            )
        )
        if program.checkpoints:
            note = "saved by the largest block while it runs again"
            rows.append(FootprintRow("recomputed block", held.again, False, note, held.at_least))
    rows += _logits(program, values)
    rows += _outputs(program, values)
    return tuple(rows)


def _state_rows(
    program: Program,
    values: Values,
    resolved: ResolvedPlan,
    dtypes: Mapping[str, torch.dtype],
    *,
    on_host: bool,
) -> Iterator[FootprintRow]:
    used = parameters_of(program)
    fsdp = resolved.plan.strategies.fsdp if program.fsdp_units is not None else None
    ways = math.prod(resolved.axes[a] for a in sharding_axes(resolved)[0]) if fsdp else 1
    counts = {
        n: shard_size(program, n, values[n], ways) if fsdp else values[n].numel() for n in used
    }
    sizes = {n: counts[n] * dtypes.get(name_of(program, n), values[n].dtype).itemsize for n in used}
    learnt = [n for n in used if used[n] and values[n].requires_grad and program.grad]
    trained = sum(sizes[n] for n in learnt)
    host = on_host and fsdp is not None and fsdp.offload == "cpu"
    cut = f"shards of 1/{ways}, rounded up" if fsdp else ""
    yield FootprintRow("parameters", sum(sizes.values()), bool(fsdp), cut, on_host=host)
    if program.grad:
        yield FootprintRow("gradients", trained, True, "as the trained parameters", on_host=host)
        moments = 2 * trained + _STEP * len(learnt)
        note = "AdamW: two moments as the trained parameters"
        yield FootprintRow("optimizer state", moments, True, note, on_host=host)
    if fsdp is not None and ways > 1:
        yield _gathered(program, values, PRECISIONS.get(fsdp.mixed_precision), fsdp.reshard)
    buffers = sum(
        values[n].numel() * values[n].element_size()
        for n in program.flat.nodes
        if n.op == "placeholder"
        and n.name in program.capture.state
        and n.name not in program.capture.parameters
    )
    if buffers:
        yield FootprintRow("buffers", buffers, False, "whole on every rank")


def _gathered(
    program: Program, values: Values, low: torch.dtype | None, reshard: bool
) -> FootprintRow:
    assert program.fsdp_units is not None
    units: dict[str, int] = dict.fromkeys(("", *program.fsdp_units), 0)
    for node in parameters_of(program):
        value: Tensor = values[node]
        wide = not (low and value.is_floating_point())
        element = value.element_size() if wide or low is None else low.itemsize
        units[owner(name_of(program, node), program.fsdp_units)] += value.numel() * element
    root = units.pop("")
    largest = sorted(units.values())[-2:] if reshard else units.values()
    what = "the two largest blocks (one is fetched while another computes)"
    note = f"whole at one time: the root and {what if reshard else 'all blocks'}"
    return FootprintRow("gathered parameters", root + sum(largest), True, note)


def _logits(program: Program, values: Values) -> Iterator[FootprintRow]:
    """What the head gives on this rank."""
    for node in program.flat.nodes:
        if not isinstance(node.target, ops.ChunkedLoss):
            continue
        operands: list[Any] = [values[n] if isinstance(n, Node) else n for n in node.args]
        x, weight = operands[0], operands[2]
        rows = part_size(x.numel() // x.shape[-1], node.target.chunks)
        size = rows * weight.shape[0] * x.element_size()
        note = f"of one chunk: {rows} tokens x {weight.shape[0]}, {_name(x)}"
        yield FootprintRow("logits", size, True, note)
        return
    head = _head(program)
    if head is not None:
        value: Tensor = values[head]
        shape = " x ".join(map(str, value.shape))
        yield FootprintRow("logits", value.nbytes, False, f"{shape}, {_name(value)}")


def _head(program: Program) -> Node | None:
    """The linear before the loss; before the output of that name where there is no loss."""
    graph = program.flat
    starts = [
        n.args[0]
        for n in graph.nodes
        if isinstance(n.target, ops.VocabularyLoss)
        or (n.op == "call_function" and op_name(n) == "aten.cross_entropy_loss")
    ]
    leaves: Any = graph.output_node().args[0]
    starts += [
        leaf
        for name, leaf in zip(program.capture.output_names, leaves, strict=True)
        if name.split(".")[-1] in ("logits", "output")
    ]
    for start in starts:
        node: Any = start
        while isinstance(node, Node) and node.op == "call_function":
            if isinstance(node.target, ops.ColumnLinear) or op_name(node) in _LINEARS:
                return node
            node = node.args[0] if node.args else None
    return None


def _outputs(program: Program, values: Values) -> Iterator[FootprintRow]:
    leaves: Any = program.flat.output_node().args[0]
    for name, leaf in zip(program.capture.output_names, leaves, strict=True):
        value = values.get(leaf) if isinstance(leaf, Node) else None
        if isinstance(value, Tensor) and value.dim():
            shape = " x ".join(map(str, value.shape))
            note = f"{shape}, {_name(value)}"
            yield FootprintRow(f"output {name}", value.nbytes, False, note)


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
