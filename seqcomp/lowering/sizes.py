"""Sizes of the whole, computed once at the top of a graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from seqcomp.capture.edit import op_name
from seqcomp.capture.sizes import BATCH_SYMBOL, LENGTH_SYMBOL, SizeEmitter, product
from seqcomp.lowering.context import Graph, LoweringContext

aten = torch.ops.aten


def global_sizes_pass(graph: Graph, context: LoweringContext) -> Graph:
    """Every size is computed at the root from the global batch and length.

    A data rank sees its slice of the batch, so the global batch is the local one times the
    degree; the length of an input is the global one already.
    """
    capture = context.capture
    emitter = size_emitter(graph, context)
    for node in list(graph.nodes):
        name = op_name(node)
        if name in ("aten.sym_size", "aten.sym_numel") and "root_size" not in node.meta:
            shape = capture.shape(node.args[0])
            value = shape[node.args[1]] if name == "aten.sym_size" else product(shape)
            node.replace_all_uses_with(emitter.emit(value, _first(graph)))
            graph.erase_node(node)
    return graph


def _first(graph: Graph) -> Node:
    return next(n for n in graph.nodes if n.op != "placeholder" and "root_size" not in n.meta)


def size_emitter(graph: Graph, context: LoweringContext) -> SizeEmitter:
    """An emitter whose B and S are nodes at the top of the graph."""
    capture, symbols = context.capture, {}
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    for role, symbol, degree in (
        ("batch", BATCH_SYMBOL, context.mesh.degree(context.mesh.batch)),
        ("seq", LENGTH_SYMBOL, 1),
    ):
        found = next(
            (
                (placeholders[name], dims.index(role))
                for name, dims in zip(capture.inputs, capture.dims, strict=True)
                if dims is not None
                and dims.index(role) is not None
                and capture.shape(placeholders[name])[dims.index(role)] == symbol
            ),
            None,
        )
        if found is None:
            continue
        node = _root_call(graph, aten.sym_size.int, found)
        if degree > 1:
            node = _root_call(graph, _times, (node, degree))
        symbols[symbol] = node
    if capture.length == LENGTH_SYMBOL and LENGTH_SYMBOL not in symbols:
        # Of a sequence that the model makes itself.
        made = capture.hints[LENGTH_SYMBOL]
        symbols[LENGTH_SYMBOL] = _root_call(graph, operator.pos, (made,))
    return SizeEmitter(graph, symbols)


def _root_call(graph: Graph, target: Any, args: Any) -> Node:
    with graph.inserting_before(_first(graph)):
        node = graph.call_function(target, tuple(args))
    node.meta["nn_module_stack"] = {}
    node.meta["root_size"] = True
    return node


def _times(size: int, degree: int) -> int:
    return size * degree


def of_one_rank(node: Node) -> Node | None:
    """The size of one rank's slice that `node` scales up to the whole; None for other nodes."""
    return node.args[0] if node.target is _times else None
