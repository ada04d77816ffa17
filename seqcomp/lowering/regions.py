"""The lowered graph as regions of local work and the redistributions between them (networkx)."""

from __future__ import annotations

from typing import Any

import networkx as nx
import torch
from torch.fx import Node

from seqcomp.capture.edit import module_path
from seqcomp.lowering import ops


def region_graph(graph: torch.fx.Graph) -> nx.DiGraph[int]:
    """Regions (nodes: `ops` how many operations, `modules` their paths) and what moves between.

    Operations that exchange nothing belong to one region when one uses the other's value. A
    redistribution or an attention is a region of its own with `operation` set; edges carry the
    `values` (names) that cross.
    """
    members: nx.Graph[Node] = nx.Graph()
    moves: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        members.add_node(node)
        if isinstance(node.target, ops.Op) and not isinstance(
            node.target, ops.Constant | ops.TokenLocal
        ):
            moves.add(node)
    for node in members.nodes:
        if node in moves:
            continue
        for operand in node.all_input_nodes:
            if operand in members and operand not in moves:
                members.add_edge(operand, node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    groups = sorted(
        nx.connected_components(members), key=lambda group: min(order[n] for n in group)
    )
    region_of = {node: index for index, group in enumerate(groups) for node in group}
    result: nx.DiGraph[int] = nx.DiGraph()
    for index, group in enumerate(groups):
        result.add_node(index, **_describe(group, moves))
    for node, index in region_of.items():
        for operand in node.all_input_nodes:
            source = region_of.get(operand)
            if source is None or source == index:
                continue
            if not result.has_edge(source, index):
                result.add_edge(source, index, values=())
            known = result.edges[source, index]["values"]
            result.edges[source, index]["values"] = tuple(dict.fromkeys((*known, operand.name)))
    return result


def _describe(group: set[Node], moves: set[Node]) -> dict[str, Any]:
    modules = tuple(sorted({module_path(n) for n in group}))
    single = next(iter(group))
    operation = str(single.target) if len(group) == 1 and single in moves else ""
    return {"ops": len(group), "modules": modules, "operation": operation}
