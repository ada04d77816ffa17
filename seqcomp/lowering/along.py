"""Local forms of operations along the sharded sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from seqcomp.capture.edit import argument, module_path, op_name
from seqcomp.capture.windows import Window
from seqcomp.lowering import ops
from seqcomp.lowering.context import Graph, LoweringContext
from seqcomp.lowering.redistribute import Redistributor, common_scope
from seqcomp.placement.rule import Decision

aten = torch.ops.aten


def window_form(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """Neighbours travel."""
    window = node.target
    assert isinstance(window, Window)
    node.target = ops.Windowed(window, decision.attributes["axes"], module_path(node))


def running_sum_form(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """Totals travel."""
    attributes = decision.attributes
    node.target = ops.RunningSum(
        attributes["dim"], attributes["axes"], argument(node, 2, "dtype"), module_path(node)
    )
    node.args, node.kwargs = node.args[:1], {}


def tokens_form(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """The owners give the tokens; the sum over the ranks comes where it is needed."""
    name, dim = op_name(node), decision.attributes["dim"]
    x, length = node.args[0], made.size(context.capture.length, node)
    how: Any = {"aten.gather": "gather", "rows_at": "rows"}.get(name, "lookup")
    positions: Any
    if name == "aten.select":
        positions = [node.args[2]]
    elif name == "aten.slice":
        positions = _sliced(node, made, context)
    elif name == "aten.index":
        positions = next(i for i in node.args[1] if i is not None)
    elif name == "rows_at":
        positions = node.args[1]
    else:
        positions = argument(node, 2, "index")
    target = ops.TokensAt(dim, decision.attributes["axes"], how)
    if name != "aten.select":
        node.target, node.args, node.kwargs = target, (x, positions, length), {}
        return
    taken = made.call(target, (x, positions, length), node, common_scope(node, node), node)
    node.target, node.args, node.kwargs = aten.select.int, (taken, dim, 0), {}


def _sliced(node: Node, made: Redistributor, context: LoweringContext) -> list[int]:
    """Positions of a slice of a known number of tokens; negative ones count from the end."""
    start, step = argument(node, 2, "start", 0), argument(node, 4, "step", 1)
    dim = argument(node, 1, "dim", 0) % len(context.capture.shape(node))
    count = int(context.capture.shape(node)[dim])
    assert isinstance(start, int), "a slice from a place that depends on the length"
    return [start + step * i for i in range(count)]
