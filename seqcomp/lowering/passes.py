"""The passes from a captured global graph to a graph of local tensors, in order."""

from __future__ import annotations

import torch
from torch.fx import Node

from seqcomp.capture.edit import argument, module_path, op_name
from seqcomp.lowering import ops
from seqcomp.lowering.context import Graph, LoweringContext, Pass
from seqcomp.lowering.gradients import sum_gradients_pass
from seqcomp.lowering.hoist import hoist_shards_pass
from seqcomp.lowering.outputs import output_boundary_pass
from seqcomp.lowering.redistribute import Redistributor
from seqcomp.lowering.sizes import global_sizes_pass, size_emitter
from seqcomp.placement.assign import assign
from seqcomp.placement.rule import Decision
from seqcomp.placement.spec import Spec

aten = torch.ops.aten

# Operations that name sizes of their result, and where.
_SIZED = {
    "aten.view": 1,
    "aten.reshape": 1,
    "aten._unsafe_view": 1,
    "aten.expand": 1,
    "aten.broadcast_to": 1,
    "aten.unflatten": 2,
}


def assign_pass(graph: Graph, context: LoweringContext) -> Graph:
    """Placements for every value; changes nothing."""
    context.placement = assign(context.capture, context.mesh)
    context.findings.extend(context.placement.findings)
    return graph


def redistribute_pass(graph: Graph, context: LoweringContext) -> Graph:
    """Inserts collectives and cuts, and gives every operation its local form."""
    placement = context.placement
    assert placement is not None
    made = Redistributor(graph, context.mesh, size_emitter(graph, context))
    for node in list(graph.nodes):
        decision = placement.decisions.get(node)
        if decision is None:
            continue
        for operand, want in decision.wants.items():
            have = placement.native[operand]
            if isinstance(have, Spec) and have != want:
                node.replace_input_with(operand, made.get(operand, have, want, node))
        _LOCAL_FORMS[decision.form](graph, node, decision, made, context)
    made.count_promises()
    return graph


def _local(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """Sizes named in the arguments become local ones."""
    position = _SIZED.get(op_name(node))
    if position is None or not isinstance(decision.out, Spec):
        return
    out = decision.out
    first = 0
    if op_name(node) == "aten.unflatten":  # its dim counts those of the operand
        first = node.args[1] % (len(out.dims) - len(node.args[position]) + 1)
    sizes = []
    for offset, size in enumerate(node.args[position]):
        degree = context.mesh.degree(out.axes_of(first + offset))
        named = size if isinstance(size, Node) or size != -1 else None
        sizes.append(-1 if named is None else made.floordiv(named, degree, node))
    args = list(node.args)
    args[position] = sizes
    node.args = tuple(args)


def _mean(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """Mean over equal shards: the local mean, divided by their number, summed later."""
    degree = decision.attributes["degree"]
    users = list(node.users)
    with graph.inserting_after(node):
        part = graph.call_function(aten.div.Scalar, (node, degree))
    part.meta.update(node.meta)
    for user in users:
        user.replace_input_with(node, part)
    assert context.placement is not None
    context.placement.native[part] = decision.out
    moved = context.placement.decisions
    for user in users:
        if user in moved and node in moved[user].wants:
            wants = dict(moved[user].wants)
            wants[part] = wants.pop(node)
            moved[user] = Decision(wants, moved[user].out, moved[user].form, moved[user].attributes)


def _attention(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    _heads(graph, node, decision, made, context)
    info = node.meta["attention"]
    transport = context.transports[info.where]
    node.target = ops.Attention(info.mask, info.scale, transport, info.where)
    node.args = node.args[:3]


def _heads(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """Attention over heads cut by the tensor axis; of too few KV heads each rank takes its own."""
    if not decision.attributes["sliced"]:
        return
    info = node.meta["attention"]
    op = ops.OwnHeads(decision.attributes["by_head"], info.kv_heads)
    for operand in dict.fromkeys(node.args[1:3]):
        with graph.inserting_before(node):
            own = graph.call_function(op, (operand,))
        own.meta.update(operand.meta)
        node.replace_input_with(operand, own)


def _column(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """A linear of gathered tokens saves the shard and gathers it again in backward."""
    x = node.args[0]
    if not isinstance(x.target, ops.Gather) or not context.grad:
        return
    bias = node.args[2] if len(node.args) > 2 else None
    node.target = ops.ColumnLinear()
    node.args = (x, x.args[0], node.args[1], bias, made.remembered(x))


def _vocabulary(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    axis = context.mesh.tensor
    assert axis is not None
    node.target = ops.VocabularyEmbedding((axis,), argument(node, 2, "padding_idx", -1))
    node.args, node.kwargs = node.args[:2], {}


def _vocabulary_loss(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    node.target = ops.VocabularyLoss(
        axes=decision.attributes["axes"],
        classes=decision.attributes["classes"],
        ignore_index=argument(node, 4, "ignore_index", -100),
        reduce=argument(node, 3, "reduction", 1) == 2,
        label=module_path(node) or "loss",
    )
    node.args, node.kwargs = node.args[:2], {}


def _unchanged(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """New tensors have their global size on every rank."""


_LOCAL_FORMS = {
    "local": _local,
    "mean": _mean,
    "attention": _attention,
    "create": _unchanged,
    "heads": _heads,
    "column": _column,
    "vocabulary": _vocabulary,
    "vocabulary_loss": _vocabulary_loss,
}


PASSES: tuple[Pass, ...] = (
    Pass("global_sizes", global_sizes_pass, (), ("global_sizes",)),
    Pass("assign", assign_pass, ("global_sizes",), ("placement",)),
    Pass("redistribute", redistribute_pass, ("placement",), ("local",)),
    Pass("output_boundary", output_boundary_pass, ("local",), ("outputs",)),
    Pass("sum_gradients", sum_gradients_pass, ("placement", "local"), ("gradients",)),
    Pass("hoist_shards", hoist_shards_pass, ("local", "outputs"), ("hoisted",)),
)
