"""What the options of `memory` keep for the backward, beside what would be kept without them.

Counted on the local graph with the sizes of a call: storages that autograd saves, each once,
without parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from seqcomp.layout.heads import head_map
from seqcomp.lowering import ops
from seqcomp.lowering.memory import KEPT, Rerun
from seqcomp.lowering.program import Program
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.report.local import Saved, is_fused
from seqcomp.report.mlp import chunk_bytes, mlp_rows, saved_by_mlp
from seqcomp.report.storages import Bytes, MemoryRow, Values, key_of, operands, pattern, storages
from seqcomp.runtime.attention.merge import accumulator_dtype
from seqcomp.runtime.chunked_mlp import number_of

_SAVING = (
    ops.Attention, ops.ChunkedLoss, ops.ChunkedMlp, ops.ColumnLinear, ops.TokenLocal,
    ops.VocabularyEmbedding, ops.VocabularyLoss,
)  # fmt: skip


class Again:
    """Which operations of a program run a second time, in backward."""

    def __init__(self, program: Program, saved: Saved) -> None:
        self._within = {n: rerun for rerun in program.checkpoints.values() for n in rerun.nodes}
        self._runs: set[Node] = set()
        for rerun in program.checkpoints.values():
            self._runs.update(_second_run(rerun, saved))

    def inside(self, node: Node) -> bool:
        """Whether the node is in a call that runs again."""
        return node in self._within

    def sends(self, node: Node) -> bool:
        """Whether what the node sends in forward is sent again."""
        if node not in self._runs:
            return False
        kept = isinstance(node.target, (*KEPT, ops.Attention))
        return not (kept and self._within[node].how.keeps)


def _second_run(rerun: Rerun, saved: Saved) -> tuple[Node, ...]:
    """The nodes up to the last whose saved values the backward needs."""
    saving = [i for i, n in enumerate(rerun.nodes) if n in saved or isinstance(n.target, _SAVING)]
    if not saving:
        return ()
    return rerun.nodes[: saving[-1] + 1] if rerun.how.early_stop else rerun.nodes


def memory_rows(
    program: Program, values: Values, saved: Saved, resolved: ResolvedPlan, *, on_host: bool
) -> tuple[MemoryRow, ...]:
    """A row for each option of `memory` that the program makes use of.

    values, saved: as from `local_values`. on_host: whether `offload` has somewhere to move to.
    """
    memory = resolved.plan.memory
    rows = []
    if program.checkpoints:
        reruns = list(program.checkpoints.values())
        inside = {node for rerun in reruns for node in rerun.nodes}
        state = state_of(program, values)
        count = Count(values, saved, resolved, state)
        outside = count.saved_by(n for n in program.flat.nodes if n not in inside)
        count.known |= outside.keys()
        kept: Bytes = {}
        for rerun in reruns:
            kept |= count.kept_of(rerun)
        rows.append(
            MemoryRow(
                what=f"checkpoint: {memory.checkpoint}",
                where=pattern(rerun.path for rerun in reruns),
                count=len(reruns),
                bytes_kept=sum(kept.values()),
                bytes_without=sum(count.saved_by(inside).values()),
                at_least=any(map(_is_unknown, inside)),
                on_host=on_host and memory.offload == "cpu",
            )
        )
    rows += mlp_rows(program, values)
    rows += [
        _chunked(node, node.target, values)
        for node in program.flat.nodes
        if isinstance(node.target, ops.ChunkedLoss) and values[node].requires_grad
    ]
    return tuple(rows)


@dataclass(frozen=True)
class SavedBytes:
    """What one rank holds for the backward when the forward ends, in bytes.

    `again`: what the largest call that runs again saves more while it does. `at_least`: a unit
    that runs untraced saves more than is known.
    """

    kept: int
    again: int
    at_least: bool


def saved_bytes(
    program: Program, values: Values, saved: Saved, resolved: ResolvedPlan
) -> SavedBytes:
    """All that a call saves; arguments as of `memory_rows`."""
    count = Count(values, saved, resolved, state_of(program, values))
    reruns = list(program.checkpoints.values())
    inside = {node for rerun in reruns for node in rerun.nodes}
    kept = count.saved_by(n for n in program.flat.nodes if n not in inside)
    count.known |= kept.keys()
    for rerun in reruns:
        kept |= count.kept_of(rerun)
    count.known |= kept.keys()
    return SavedBytes(
        kept=sum(kept.values()),
        again=max((_again(rerun, count, values) for rerun in reruns), default=0),
        at_least=any(map(_is_unknown, program.flat.nodes)),
    )


def _again(rerun: Rerun, count: Count, values: Values) -> int:
    mlps = [(n, n.target) for n in rerun.nodes if isinstance(n.target, ops.ChunkedMlp)]
    one = max((chunk_bytes(node, op, values) for node, op in mlps), default=0)
    return sum(count.saved_by(rerun.nodes).values()) + one


def state_of(program: Program, values: Values) -> set[Any]:
    """Storages of parameters and buffers."""
    return {
        key_of(values[node])
        for node in program.flat.nodes
        if node.op == "placeholder" and node.name in program.capture.state
    }


class Count:
    """Storages that are not `known` to be there anyway."""

    def __init__(
        self, values: Values, saved: Saved, resolved: ResolvedPlan, known: set[Any]
    ) -> None:
        self._values, self._saved, self._resolved = values, saved, resolved
        self.known = known

    def saved_by(self, nodes: Iterable[Node]) -> Bytes:
        """What autograd saves of the forward of `nodes`."""
        found: Bytes = {}
        for node in nodes:
            if not is_fused(node, self._values):
                found |= storages(self._saved.get(node, ()))
            if isinstance(node.target, ops.Op) or is_fused(node, self._values):
                found |= self._by_operation(node)
        return self._new(found)

    def _by_operation(self, node: Node) -> Bytes:
        """What an operation of ours saves, and attention that one kernel computes."""
        value = self._values[node]
        if isinstance(node.target, ops.TokenLocal):
            return _of_unit(node, node.target, self._values)
        if not (isinstance(value, Tensor) and value.requires_grad):
            return {}
        match node.target:
            case ops.ColumnLinear():
                return storages([operands(node, self._values)[1]])
            case ops.VocabularyEmbedding():
                _, index = operands(node, self._values)[:2]
                # Where tokens are among this rank's words, and which are.
                places = index.numel() * (index.element_size() + value.element_size())
                return {(node, "places"): places}
            case ops.VocabularyLoss():
                logits, target = operands(node, self._values)[:2]
                wide = max(logits.element_size(), 4)
                # Probabilities; of the targets, their places and two flags each.
                places = target.numel() * (target.element_size() + 2)
                return {(node, "probabilities"): logits.numel() * wide, (node, "places"): places}
            case ops.ChunkedLoss() as op:
                return _of_chunks(node, op, self._values)
            case ops.ChunkedMlp() as op:
                return saved_by_mlp(node, op, self._values)
            case ops.Attention():
                return self._attention(node, self._resolved.ulysses_size)
        if is_fused(node, self._values):
            return self._attention(node, 1) | self._added(node)
        return {}

    def kept_of(self, rerun: Rerun) -> Bytes:
        """The inputs of a call, and what it keeps of its first run."""
        found = self.inputs_of(rerun)
        for node in rerun.nodes:
            if not rerun.how.keeps:
                continue
            if isinstance(node.target, ops.Attention):
                found |= storages([self._values[node]])
                given = storages(operands(node, self._values)[:3])
                own = self._attention(node, self._resolved.ulysses_size)
                found |= {k: v for k, v in own.items() if k not in given}
            elif isinstance(node.target, KEPT) or _is_kept_mlp(node, self._values):
                found |= storages([self._values[node]])
            elif "attention" in node.meta:
                given = storages(self._values[x] for x in node.all_input_nodes)
                fused = is_fused(node, self._values)
                own = self._attention(node, 1) if fused else self._given_by(node)
                found |= {k: v for k, v in own.items() if k not in given}
        return self._new(found)

    def inputs_of(self, rerun: Rerun, *, learns: bool | None = None) -> Bytes:
        """What comes into a call; with `learns` of that what does, or does not."""
        operands = dict.fromkeys(x for node in rerun.nodes for x in node.all_input_nodes)
        inside = set(rerun.nodes)
        given = [pytree.tree_leaves(self._values[x]) for x in operands if x not in inside]
        tensors = (x for leaves in given for x in leaves if isinstance(x, Tensor))
        return self._new(storages(x for x in tensors if learns in (None, x.requires_grad)))

    def _new(self, found: Bytes) -> Bytes:
        return {key: size for key, size in found.items() if key not in self.known}

    def _given_by(self, node: Node) -> Bytes:
        """What a kernel of torch saves and gives again: not a mask that is added. Attention that
        no kernel computes does not save its result, and nothing of it is kept."""
        saved, mask = self._saved.get(node, ()), operands(node, self._values)[3]
        if key_of(self._values[node]) not in storages(saved):
            return {}
        pairs = mask.shape[-2:] if isinstance(mask, Tensor) else None
        return storages(x for x in saved if x.shape[-2:] != pairs)

    def _added(self, node: Node) -> Bytes:
        """A mask of all pairs as kernels add it: of a boolean one each call makes its own."""
        q, _, _, mask = operands(node, self._values)[:4]
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            return {(node, "mask"): mask.numel() * q.element_size()}
        return storages([mask])

    def _attention(self, node: Node, degree: int) -> Bytes:
        """Queries, keys, values, the output and its log-sum-exp, of the heads of this rank."""
        q, k, v = operands(node, self._values)[:3]
        wide = accumulator_dtype(q.dtype).itemsize
        if degree == 1:
            lse = {(node, "lse"): q.numel() // q.shape[3] * wide}
            return storages([q, k, v, self._values[node]]) | lse
        heads = head_map(q.shape[1], k.shape[1], degree)
        tokens = q.shape[0] * q.shape[2] * degree
        widths = {
            "q": heads.rank_queries * q.shape[3],
            "k": heads.rank_keys * k.shape[3],
            "v": heads.rank_keys * v.shape[3],
            "out": heads.rank_queries * v.shape[3],
        }
        found = {(node, name): tokens * n * q.element_size() for name, n in widths.items()}
        return found | {(node, "lse"): tokens * heads.rank_queries * wide}


def _is_unknown(node: Node) -> bool:
    return isinstance(node.target, ops.TokenLocal) and node.target.unit.kept is None


def _of_unit(node: Node, op: ops.TokenLocal, values: Values) -> Bytes:
    """What the code of a unit keeps."""
    kept, results = op.unit.kept, values[node]
    if kept is None or not any(x.requires_grad for x in results):
        return {}
    given: Any = node.args[0]
    inputs = [values[x] for x in given]
    found = storages([*(inputs[i] for i in kept.inputs), *(results[i] for i in kept.results)])
    return found | {(node, "inside"): kept.own(inputs)}


def _is_kept_mlp(node: Node, values: Values) -> bool:
    op = node.target
    if not isinstance(op, ops.ChunkedMlp) or op.last:
        return False
    return number_of(operands(node, values)[0], op.chunks) > 1


def _of_chunks(node: Node, op: ops.ChunkedLoss, values: Values) -> Bytes:
    x, shard, _, _, _, target, _ = operands(node, values)
    own = storages([x if shard is None else shard, target])
    if op.shared is None:
        return own
    return own | {(node, "lse"): target.numel() * accumulator_dtype(op.dtype).itemsize}


def _chunked(node: Node, op: ops.ChunkedLoss, values: Values) -> MemoryRow:
    x, shard, weight, bias, _, target, classes = operands(node, values)
    tokens = target.numel()
    own = _of_chunks(node, op, values)
    found = storages([x if shard is None else shard, target])
    if op.shared is not None:
        # In place of the targets: their places among this rank's classes, and two flags each.
        found[key_of(target)] = tokens * (target.element_size() + 2)

    def pack(value: Tensor) -> None:
        # Nothing is given back: what the graph of autograd held would hold the graph.
        if key_of(value) not in storages([x, weight, bias, classes]):
            held.append(value.detach())

    held: list[Tensor] = []
    with x.fake_mode, torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        logits = op.after(torch.nn.functional.linear(x, weight, bias).flatten(0, -2))
        if op.shared is None:
            op.each(logits, target.reshape(-1), classes)
        else:
            held.append(torch.empty_like(logits, dtype=accumulator_dtype(logits.dtype)))
    found |= storages(held)
    return MemoryRow(
        what=f"loss_chunks: {op.chunks}",
        where=node.meta["head"],
        count=1,
        bytes_kept=sum(own.values()),
        bytes_without=sum(found.values()),
    )
