"""What MLPs hold that run in chunks of tokens, beside what they would hold at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from seqcomp.capture.edit import module_path
from seqcomp.lowering import ops
from seqcomp.lowering.program import Program
from seqcomp.report.storages import Bytes, MemoryRow, Values, key_of, operands, pattern, storages
from seqcomp.runtime.chunked_mlp import number_of


def saved_by_mlp(node: Node, op: ops.ChunkedMlp, values: Values) -> Bytes:
    """What the autograd node of an MLP saves: x, or the shard of which it was gathered."""
    x, shard, *_ = operands(node, values)
    if number_of(x, op.chunks) == 1:
        return _at_once(node, op, values)
    return storages([x if shard is None else shard])


def chunk_bytes(node: Node, op: ops.ChunkedMlp, values: Values) -> int:
    """What one chunk saves besides, while its gradients are made."""
    x, shard, *_ = operands(node, values)
    number = number_of(x, op.chunks)
    if number == 1:
        return 0
    given = storages([x if shard is None else shard])
    inside = {k: v for k, v in _at_once(node, op, values).items() if k not in given}
    return sum(-(-size // number) for size in inside.values())


def mlp_rows(program: Program, values: Values) -> list[MemoryRow]:
    """A row for MLPs of one kind: what they save when their block runs again."""
    found: dict[tuple[str, str, int, int], int] = {}
    for node in program.flat.nodes:
        op = node.target
        if not isinstance(op, ops.ChunkedMlp) or not values[node].requires_grad:
            continue
        number = number_of(operands(node, values)[0], op.chunks)
        if number == 1:
            continue
        kept = sum(saved_by_mlp(node, op, values).values()) + chunk_bytes(node, op, values)
        whole = sum(_at_once(node, op, values).values())
        where = pattern([module_path(node)])
        key = (f"checkpoint: selective, {number} chunks of tokens", where, kept, whole)
        found[key] = found.get(key, 0) + 1
    return [
        MemoryRow(what, where, count, kept, whole)
        for (what, where, kept, whole), count in found.items()
    ]


def _at_once(node: Node, op: ops.ChunkedMlp, values: Values) -> Bytes:
    """What autograd saves of all tokens at once, without the parameters."""
    x, shard, _, *parameters = operands(node, values)
    own = storages(parameters)
    held: list[Tensor] = []

    def pack(value: Tensor) -> None:
        # Nothing is given back: what the graph of autograd held would hold the graph.
        if key_of(value) not in own:
            held.append(value.detach())

    with x.fake_mode, torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        op.whole(x, None, None, *parameters)
    found = storages(held)
    if shard is not None and found.pop(key_of(x), None) is not None:
        found |= storages([shard])
    return found
