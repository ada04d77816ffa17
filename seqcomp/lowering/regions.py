"""The lowered graph as regions of local work and the redistributions between them (networkx).

Blocks that repeat (the layers of a decoder) can be folded: the first of equal ones stands for all.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import torch
from torch.fx import Node

from seqcomp.capture.edit import module_path, op_name
from seqcomp.lowering import ops

# Operations that take part in an exchange, or choose a rank's part: regions of their own.
_MOVES = (
    ops.AllReduce, ops.AllToAll, ops.Attention, ops.Gather, ops.PadPart, ops.Part,
    ops.ReduceScatter, ops.RunningSum, ops.Shard, ops.TokensAt, ops.VocabularyLoss, ops.Windowed,
)  # fmt: skip
# Operations that hand parameters to those that use them.
_HANDING = (
    ops.FillBucket, ops.LocalPart, ops.OpenBucket, ops.PadPart, ops.Part, ops.Shard,
    ops.SumGradient,
)  # fmt: skip
# Operations that are there for the backward, or for sizes.
_UNSEEN = (ops.PaddedLength, ops.Remember, ops.Constant)
LONGEST_PERIOD = 8
"""Blocks after which a sequence of blocks may repeat (five windows, one full attention: 6)."""


@dataclass(frozen=True)
class Repeat:
    """Blocks `paths` have the operations of the first of them, which is drawn for all."""

    paths: tuple[str, ...]


def region_graph(
    graph: torch.fx.Graph, inputs: Collection[str], *, fold: bool = False
) -> nx.DiGraph[int]:
    """Regions and what moves between them; without cycles, in the order of the forward.

    `inputs`: placeholders of what the caller gives; the others are parameters and buffers.

    Nodes have `kind` ("work", "move", "input" or "output"), `ops` (how many operations),
    `members` (their names), `modules` (their paths), `block` (path of the repeated block they are
    in, or ""), `operation` (of a move: the operation itself, as text) and `level`. Operations that
    exchange nothing are one region where they are in one block or use each other's values, and
    have the same number of redistributions before them; equal redistributions likewise. Edges have
    the `values` (names) that cross. What hands out parameters, and sizes, are left out. `fold`: of
    equal blocks the first is there; `graph.graph["repeats"]` lists them.
    """
    hidden = _hidden(graph, inputs)
    seen = [n for n in graph.nodes if n not in hidden and n.op in ("placeholder", "call_function")]
    repeats, stands_in = _folded(seen) if fold else ((), {})
    seen = [n for n in seen if n not in stands_in]
    operands = {
        n: [o for o in (stands_in.get(a, a) for a in _operands(n)) if o not in hidden] for n in seen
    }
    region_of, levels = _grouped(seen, operands)
    result: nx.DiGraph[int] = nx.DiGraph(repeats=repeats)
    for index, group in enumerate(_groups(seen, region_of)):
        result.add_node(index, **_describe(group), level=levels[group[0]])
        for node in group:
            region_of[node] = index
    for node in seen:
        for operand in operands[node]:
            _connect(result, region_of[operand], region_of[node], operand.name)
    for leaf in dict.fromkeys(graph.output_node().all_input_nodes):
        node = stands_in.get(leaf, leaf)
        if node in region_of:
            index, level = len(result), levels[node] + 1
            result.add_node(index, **_outside("output", node), level=level)
            _connect(result, region_of[node], index, node.name)
    return result


def block_of(path: str) -> str:
    """'model.layers.3.self_attn' -> 'model.layers.3'; '' for what is in no list of modules."""
    parts = path.split(".")
    digit = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if digit is None else ".".join(parts[: digit + 1])


def _hidden(graph: torch.fx.Graph, inputs: Collection[str]) -> set[Node]:
    """Parameters and buffers, what hands them out, sizes, and what only the backward needs."""
    found: set[Node] = set()
    for node in graph.nodes:
        operands = node.all_input_nodes
        if node.op == "placeholder":
            gone = not node.users or node.name not in inputs
        elif isinstance(node.target, _UNSEEN) or _is_size(node):
            gone = True
        else:
            handing = isinstance(node.target, _HANDING) or node.target is operator.getitem
            gone = handing and bool(operands) and all(o in found for o in operands)
        if gone:
            found.add(node)
    return found


def _operands(node: Node) -> list[Node]:
    """What the forward needs: two operations keep the shard of what they get for the backward."""
    kept = isinstance(node.target, ops.ColumnLinear | ops.ChunkedLoss)
    given = [a for i, a in enumerate(node.args) if i != 1] if kept else None
    return node.all_input_nodes if given is None else [a for a in given if isinstance(a, Node)]


def _is_size(node: Node) -> bool:
    name = op_name(node)
    home = str(getattr(node.target, "__module__", ""))
    arithmetic = home in ("_operator", "math", "torch") or home.startswith("seqcomp.")
    plain = not isinstance(node.target, ops.Op) and node.target is not operator.getitem
    return name.startswith("aten.sym_") or "assert" in name or (arithmetic and plain)


def _is_move(node: Node) -> bool:
    target = node.target
    if isinstance(target, ops.ChunkedLoss):
        return target.shared is not None
    return isinstance(target, _MOVES)


def _grouped(
    seen: Sequence[Node], operands: Mapping[Node, Sequence[Node]]
) -> tuple[dict[Node, int], dict[Node, int]]:
    """A region (any number) and a level for each node."""
    levels: dict[Node, int] = {}
    firsts: dict[tuple[int, str, str], Node] = {}
    alike: nx.Graph[Node] = nx.Graph()
    alike.add_nodes_from(seen)
    for node in seen:
        alone, block = _is_alone(node), block_of(module_path(node))
        level = 0
        for operand in operands[node]:
            apart = alone or _is_alone(operand) or block_of(module_path(operand)) != block
            level = max(level, levels[operand] + apart)
        levels[node] = level
        for operand in operands[node]:
            if not alone and not _is_alone(operand) and levels[operand] == level:
                alike.add_edge(operand, node)
        if node.op != "placeholder" and (alone or block):
            # What a block does between two redistributions is one region; so are equal ones.
            key = (level, block, str(node.target) if alone else "")
            alike.add_edge(firsts.setdefault(key, node), node)
    groups = enumerate(nx.connected_components(alike))
    return {node: i for i, group in groups for node in group}, levels


def _is_alone(node: Node) -> bool:
    return node.op == "placeholder" or _is_move(node)


def _groups(seen: Sequence[Node], region_of: Mapping[Node, int]) -> list[list[Node]]:
    found: dict[int, list[Node]] = {}
    for node in seen:
        found.setdefault(region_of[node], []).append(node)
    return list(found.values())


def _describe(group: Sequence[Node]) -> dict[str, Any]:
    first = group[0]
    if first.op == "placeholder":
        return _outside("input", first)
    move = _is_move(first)
    return {
        "kind": "move" if move else "work",
        "ops": len(group),
        "members": tuple(n.name for n in group),
        "modules": tuple(dict.fromkeys(map(module_path, group))),
        "block": block_of(module_path(first)),
        "operation": str(first.target) if move else "",
    }


def _outside(kind: str, node: Node) -> dict[str, Any]:
    return {
        "kind": kind, "ops": 0, "members": (node.name,), "modules": (), "block": "",
        "operation": "",
    }  # fmt: skip


def _connect(result: nx.DiGraph[int], source: int, target: int, name: str) -> None:
    if source == target:
        return
    known = result.edges[source, target]["values"] if result.has_edge(source, target) else ()
    result.add_edge(source, target, values=tuple(dict.fromkeys((*known, name))))


def _folded(seen: Sequence[Node]) -> tuple[tuple[Repeat, ...], dict[Node, Node]]:
    """Blocks that repeat, and for each node of a block that is not drawn the one drawn for it."""
    blocks: dict[str, list[Node]] = {}
    for node in seen:
        if path := block_of(module_path(node)):
            blocks.setdefault(path, []).append(node)
    lists: dict[str, list[str]] = {}
    for path in blocks:
        lists.setdefault(path.rpartition(".")[0], []).append(path)
    repeats: list[Repeat] = []
    stands_in: dict[Node, Node] = {}
    for paths in lists.values():
        signatures = [_signature(path, blocks[path]) for path in paths]
        for first, period, times in _periods(signatures):
            for offset in range(period):
                equal = tuple(paths[first + offset + i * period] for i in range(times))
                repeats.append(Repeat(equal))
                for path in equal[1:]:
                    stands_in.update(zip(blocks[path], blocks[equal[0]], strict=True))
    return tuple(repeats), stands_in


def _periods(signatures: Sequence[Any]) -> list[tuple[int, int, int]]:
    """(first, period, times) of what repeats, without overlap, the most first."""
    found, at = [], 0
    while at < len(signatures):
        best = (0, 0)
        for period in range(1, LONGEST_PERIOD + 1):
            stop = at + period
            while stop < len(signatures) and signatures[stop] == signatures[stop - period]:
                stop += 1
            times = (stop - at) // period
            if times > 1 and times * period > best[0]:
                best = (times * period, period)
        if best[0]:
            found.append((at, best[1], best[0] // best[1]))
        at += max(best[0], 1)
    return found


def _signature(path: str, members: Sequence[Node]) -> tuple[Any, ...]:
    """Equal for blocks that compute the same from what they are given."""
    place = {node: i for i, node in enumerate(members)}
    return tuple(
        (
            _told(node.target).replace(path, "*"),
            module_path(node).replace(path, "*"),
            tuple(place.get(operand, -1) for operand in node.all_input_nodes),
        )
        for node in members
    )


def _told(target: Any) -> str:
    """Every dropout has a number of its own, which says nothing about what it does."""
    if isinstance(target, ops.Dropout | ops.DropPairs):
        target = replace(target, number=0)
    return str(target)
