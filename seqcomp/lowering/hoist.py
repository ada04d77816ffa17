"""Moves cuts of replicated values up to where the value is made.

RoPE tables are cut where they meet q and k, in every layer. Cutting them once where they are
computed gives the same numbers with 1/P of the work, and one cut for the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from seqcomp.capture.edit import is_tensor, op_name, transposed_dims
from seqcomp.capture.kinds import is_pointwise
from seqcomp.lowering import ops
from seqcomp.lowering.context import Graph, LoweringContext


def hoist_shards_pass(graph: Graph, context: LoweringContext) -> Graph:
    """Replaces shard(f(x)) by f(shard(x)) while f acts on each token alone."""
    made: dict[tuple[Node, ops.Shard], Node] = {}
    work = [n for n in graph.nodes if isinstance(n.target, ops.Shard)]
    for node in work:
        made.setdefault((node.args[0], node.target), node)
    while work:
        node = work.pop()
        source, op = node.args[0], node.target
        operands = _operand_cuts(source, op, context)
        if operands is None or any(user is not node for user in source.users):
            continue
        replaced: dict[Node, Node] = {}
        for operand, cut in operands.items():
            if cut is None:
                continue
            key = (operand, cut)
            length = node.args[1:]
            # The length of a padded sequence stands behind the inputs.
            known = length[0] if length and operand.op == "placeholder" else operand
            if key not in made:
                with graph.inserting_after(known):
                    made[key] = graph.call_function(cut, (operand, *length))
                made[key].meta["nn_module_stack"] = dict(operand.meta.get("nn_module_stack") or {})
                made[key].meta["source"] = operand
                if operand.op != "placeholder":
                    work.append(made[key])
            else:
                known.append(made[key])  # it may stand behind `source`
            replaced[operand] = made[key]
        context.replaced(node, _rewrite(graph, node, source, replaced))
    return graph


def _rewrite(graph: Graph, node: Node, source: Node, replaced: dict[Node, Node]) -> Node:
    def swap(item: Node) -> Node:
        return replaced.get(item, item)

    with graph.inserting_before(source):
        new = graph.call_function(
            source.target, map_arg(source.args, swap), map_arg(source.kwargs, swap)
        )
    new.meta.update({k: v for k, v in source.meta.items() if k not in ("val", "sc_shape")})
    new.meta["source"] = source
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    graph.erase_node(source)
    return new


Cuts = dict[Node, ops.Shard | None]


def _operand_cuts(source: Node, op: ops.Shard, context: LoweringContext) -> Cuts | None:
    """How the operands of `source` are cut for its result to come out cut; None to stop."""
    if source.op != "call_function" or "val" not in source.meta:
        return None
    if is_pointwise(source):
        return _pointwise(source, op, context)
    mover = _MOVERS.get(op_name(source))
    return mover(source, op, context) if mover else None


def _pointwise(source: Node, op: ops.Shard, context: LoweringContext) -> Cuts | None:
    shape = context.capture.shape(source)
    cuts: Cuts = {}
    for operand in source.all_input_nodes:
        if "val" not in operand.meta:
            return None  # a redistribution: its sizes are local ones already
        if not is_tensor(operand):
            continue
        own = context.capture.shape(operand)
        at = op.dim - (len(shape) - len(own))
        whole = at >= 0 and own[at] == shape[op.dim] and own[at] != 1
        cuts[operand] = ops.Shard(at, op.axes) if whole else None
    return cuts if any(cuts.values()) else None


def _unsqueeze(source: Node, op: ops.Shard, context: LoweringContext) -> Cuts | None:
    at = source.args[1] % len(context.capture.shape(source))
    if at == op.dim:
        return None
    return {source.args[0]: ops.Shard(op.dim - (at < op.dim), op.axes)}


def _transpose(source: Node, op: ops.Shard, context: LoweringContext) -> Cuts | None:
    order = transposed_dims(source)
    assert order is not None
    return {source.args[0]: ops.Shard(order[op.dim], op.axes)}


def _cat(source: Node, op: ops.Shard, context: LoweringContext) -> Cuts | None:
    dim = (source.args[1] if len(source.args) > 1 else 0) % len(context.capture.shape(source))
    if dim == op.dim:
        return None
    return dict.fromkeys(source.args[0], op)


_MOVERS: dict[str, Callable[[Node, ops.Shard, Any], Cuts | None]] = {
    "aten.unsqueeze": _unsqueeze,
    "aten.transpose": _transpose,
    "aten.cat": _cat,
}
