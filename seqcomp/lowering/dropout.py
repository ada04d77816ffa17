"""The local forms of dropout: the operation is told where a rank's part is in the whole."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from seqcomp.capture.recognise import AttentionInfo
from seqcomp.diagnostics import diagnostic
from seqcomp.lowering import ops
from seqcomp.lowering.context import Graph, LoweringContext
from seqcomp.lowering.redistribute import Redistributor
from seqcomp.placement.rule import Decision
from seqcomp.placement.spec import Dim, Spec


def dropout_form(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> None:
    """Dropout of a value."""
    x, keys, number, p, told_apart = node.args
    assert isinstance(decision.out, Spec)
    dims = decision.out.dims[:told_apart]
    sizes = [made.size(factor.size, node) for dim in dims for factor in dim]
    node.target = ops.Dropout(p, number, _dealt(dims, context))
    node.args = (x, keys, *sizes)


def pair_dropout(
    graph: Graph, node: Node, decision: Decision, made: Redistributor, context: LoweringContext
) -> Node | None:
    """The node that knows this rank's part of an attention's probabilities; None without dropout.

    Takes the place of the keys in the attention.
    """
    if len(node.args) <= KEYS:
        return None
    keys, number, p = node.args[KEYS : KEYS + 3]
    assert isinstance(decision.out, Spec)
    dims = decision.out.dims[:3]
    sizes = [made.size(factor.size, node) for dim in dims for factor in dim]
    columns = made.size(decision.attributes["keys"], node)
    op = ops.DropPairs(p, number, _dealt(dims, context))
    with graph.inserting_before(node):
        pairs = graph.call_function(op, (keys, *sizes, columns))
    pairs.meta["nn_module_stack"] = dict(node.meta.get("nn_module_stack") or {})
    _report(node, p, context)
    return pairs


KEYS = 10  # the place of the keys among the operands of `attention`


def _dealt(dims: Sequence[Dim], context: LoweringContext) -> tuple[tuple[ops.Dealt, ...], ...]:
    return tuple(tuple(ops.Dealt(f.axes, context.mesh.is_padded(f)) for f in dim) for dim in dims)


def _report(node: Node, p: float, context: LoweringContext) -> None:
    info: AttentionInfo = node.meta["attention"]
    context.findings.append(
        diagnostic(
            "SC413",
            where=info.where,
            found=f"dropout p={p} of attention's probabilities",
            legal="attention without dropout for a fused kernel",
            help="exact as it is, and slower; config.attention_dropout = 0.0 (or dropout_p=0.0) "
            "makes the fused kernels possible",
        )
    )
