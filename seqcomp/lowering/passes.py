"""The passes from a captured global graph to a graph of local tensors, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from seqcomp.capture.edit import argument, module_path, op_name, place_of
from seqcomp.capture.recognise import AttentionInfo
from seqcomp.capture.sizes import evaluate
from seqcomp.diagnostics import diagnostic
from seqcomp.lowering import ops
from seqcomp.lowering.along import running_sum_form, tokens_form, window_form
from seqcomp.lowering.chunks import chunk_loss_pass
from seqcomp.lowering.context import Graph, LoweringContext, Pass, Traced
from seqcomp.lowering.dropout import KEYS, dropout_form, pair_dropout
from seqcomp.lowering.fsdp_units import fsdp_units_pass
from seqcomp.lowering.gradients import sum_gradients_pass
from seqcomp.lowering.hoist import hoist_shards_pass
from seqcomp.lowering.mlp_chunks import chunk_mlp_pass
from seqcomp.lowering.outputs import output_boundary_pass
from seqcomp.lowering.padding import PaddedLoss, padding_in, real_degree
from seqcomp.lowering.redistribute import Redistributor
from seqcomp.lowering.sizes import global_sizes_pass, size_emitter
from seqcomp.lowering.snapshot import keep_global_pass
from seqcomp.lowering.tilings import tiling_of
from seqcomp.placement.assign import assign
from seqcomp.placement.repeated import repeated_work
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


# Operations in which -1 stands for the operand's own size, and may stand several times.
_KEEPS = ("aten.expand", "aten.broadcast_to")


def assign_pass(graph: Graph, context: LoweringContext) -> Graph:
    """Placements for every value; changes nothing."""
    context.placement = assign(context.capture, context.mesh, context.is_gathered)
    context.findings.extend(context.placement.findings)
    context.findings.extend(
        repeated_work(context.capture, context.mesh, context.placement.decisions)
    )
    return graph


def redistribute_pass(graph: Graph, context: LoweringContext) -> Graph:
    """Inserts collectives and cuts, and gives every operation its local form."""
    placement = context.placement
    assert placement is not None
    made = Redistributor(graph, context.mesh, size_emitter(graph, context))
    for node, spec in placement.native.items():
        if isinstance(spec, Spec):
            context.traced[node] = Traced(node.name, spec)
    for node in list(graph.nodes):
        decision = placement.decisions.get(node)
        if decision is None:
            continue
        hidden = padding_in(node, decision, context)
        loss = PaddedLoss.of(node, decision, context)
        for operand, want in decision.wants.items():
            have = placement.native[operand]
            if not isinstance(have, Spec):
                continue
            new = operand
            if have != want:
                whole_weight = _is_weight(operand, node) and have.is_replicated
                make = made.part_of if whole_weight else made.get
                args = (operand, want, node) if whole_weight else (operand, have, want, node)
                new = make(*args)
            for index, at in hidden.get(operand, ()):
                new = made.hidden(new, index, want.dims[index], at, node)
            if new is not operand:
                node.replace_input_with(operand, new)
        users = list(node.users)
        if loss is not None:
            total = loss.lowered(node, made)
            _stands_for(total, node, users, decision.out, context)
        if loss is None or decision.form != "mean":
            _LOCAL_FORMS[decision.form](graph, node, decision, made, context)
    made.count_promises()
    for source, want, value in made.redistributed():
        context.traced[value] = Traced(context.traced[source].source, want, op_name(value))
    return graph


def _is_weight(operand: Node, node: Node) -> bool:
    """Whether `operand` is the weight or bias of a linear or an embedding."""
    own = {"aten.linear": node.args[1:3], "aten.embedding": node.args[:1]}
    return operand in own.get(op_name(node), ())


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
    dims = range(first, first + len(node.args[position]))
    uneven = {i for i in dims if context.mesh.is_uneven(out.dims[i])}
    sizes: list[Any] = []
    for index, size in zip(dims, node.args[position], strict=True):
        axes = out.axes_of(index)
        if index in uneven:
            sizes.append(-1)  # of another size on each rank
        elif isinstance(size, Node) or size != -1:
            padded = any(map(context.mesh.is_padded, out.dims[index]))
            local = made.local_dim(out.dims[index], node) if padded else None
            sizes.append(local or made.floordiv(size, context.mesh.degree(axes), node))
        else:
            keep = not uneven or op_name(node) in _KEEPS
            sizes.append(-1 if keep else made.local_dim(out.dims[index], node))
    args = list(node.args)
    args[position] = sizes
    node.args = tuple(args)


def _mean(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """Mean over equal shards: the local mean, divided by their number, summed later."""
    divisor = decision.attributes["degree"]
    users = list(node.users)
    if padding_in(node, decision, context):
        divisor = real_degree(node, divisor, made)
    with graph.inserting_after(node):
        part = graph.call_function(aten.div.Scalar, (node, divisor))
    _stands_for(part, node, users, decision.out, context)


def _stands_for(
    part: Node, node: Node, users: Sequence[Node], out: Any, context: LoweringContext
) -> None:
    """`part`, made of `node`, is what the users of `node` meant."""
    part.meta.update(node.meta)
    context.replaced(node, part)
    for user in users:
        user.replace_input_with(node, part)
    assert context.placement is not None
    context.placement.native[part] = out
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
    whole = not decision.attributes["tokens"]
    dropout = pair_dropout(graph, node, decision, made, context)
    node.target = ops.Attention(
        info.mask, info.scale, transport, info.where, info.softcap, info.lse, whole
    )
    tiling = None
    if info.pairs is not None:
        rows = context.capture.shape(node)[2]
        tiling = tiling_of(graph, info.pairs, decision, made, context, rows)
        _report_dense(info, context)
    length = None
    if context.mesh.pads and not whole:
        length = made.size(context.capture.length, node)
    node.args = (*node.args[:3], tiling, node.args[7], length, dropout)


def _report_dense(info: AttentionInfo, context: LoweringContext) -> None:
    assert info.pairs is not None
    for item in info.pairs.dense:
        size = item.meta["val"].element_size()
        for extent in context.capture.shape(item):
            size *= evaluate(extent, context.capture.hints)
        context.findings.append(
            diagnostic(
                "SC407",
                where=info.where,
                found=f"{place_of(item)}, {size} bytes on every rank at this size",
                legal="masks that compare positions, document numbers or flags of tokens",
                help="exact as it is; make the mask from vectors [batch, sequence] in the model "
                "to save the memory",
            )
        )


def _whole_attention(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """Attention of a rank's heads over all tokens, as torch has it."""
    _heads(graph, node, decision, made, context)
    _drops(graph, node, decision, made, context)


def _drops(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """Attention as torch has it, of probabilities that are dropped by their places."""
    pairs = pair_dropout(graph, node, decision, made, context)
    if pairs is not None:
        node.args = (*node.args[:KEYS], pairs)


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
    padding, words = argument(node, 2, "padding_idx", -1), decision.attributes["words"]
    node.target = ops.VocabularyEmbedding((axis,), padding, words)
    node.args, node.kwargs = node.args[:2], {}


def _vocabulary_loss(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    node.target = ops.VocabularyLoss(
        axes=decision.attributes["axes"],
        classes=decision.attributes["classes"],
        words=decision.attributes["words"],
        ignore_index=argument(node, 4, "ignore_index", -100),
        reduce=argument(node, 3, "reduction", 1) == 2,
        label=module_path(node) or "loss",
    )
    node.args, node.kwargs = node.args[:2], {}


def _unit(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """The module's own code, on this rank's tokens."""
    assert isinstance(decision.out, tuple)
    axes = tuple(tuple(spec.axes_of(i) for i in range(len(spec.dims))) for spec in decision.out)
    shared = {axis for dims in axes for dim in dims for axis in dim}
    over = tuple(axis for axis in context.mesh.degrees if axis in shared)
    node.target = ops.TokenLocal(node.target, axes, over)


def _unchanged(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """New tensors have their global size on every rank."""


_LOCAL_FORMS = {
    "local": _local,
    "mean": _mean,
    "attention": _attention,
    "create": _unchanged,
    "unit": _unit,
    "heads": _whole_attention,
    "drops": _drops,
    "dropout": dropout_form,
    "column": _column,
    "vocabulary": _vocabulary,
    "vocabulary_loss": _vocabulary_loss,
    "window": window_form,
    "running_sum": running_sum_form,
    "tokens": tokens_form,
}


PASSES: tuple[Pass, ...] = (
    Pass("global_sizes", global_sizes_pass, (), ("global_sizes",)),
    Pass("assign", assign_pass, ("global_sizes",), ("placement",)),
    Pass("keep_global", keep_global_pass, ("placement",), ()),
    Pass("redistribute", redistribute_pass, ("placement",), ("local",)),
    Pass("output_boundary", output_boundary_pass, ("local",), ("outputs",)),
    Pass("chunk_loss", chunk_loss_pass, ("local", "outputs"), ()),
    Pass("chunk_mlp", chunk_mlp_pass, ("local", "outputs"), ()),
    Pass("fsdp_units", fsdp_units_pass, ("local", "outputs"), ("fsdp_units",)),
    Pass("sum_gradients", sum_gradients_pass, ("placement", "local", "fsdp_units"), ("gradients",)),
    Pass("hoist_shards", hoist_shards_pass, ("local", "outputs"), ("hoisted",)),
)
