"""Where the tiles of data-dependent masks are made: once per forward, before all that use them."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from seqcomp.capture.pair_masks import PairReading
from seqcomp.capture.sizes import Size
from seqcomp.lowering import ops
from seqcomp.lowering.context import Graph, LoweringContext
from seqcomp.lowering.redistribute import Redistributor
from seqcomp.placement.rule import Decision
from seqcomp.placement.spec import Spec


def tiling_of(
    graph: Graph,
    reading: PairReading,
    decision: Decision,
    made: Redistributor,
    context: LoweringContext,
    length: Size,
) -> Node:
    """The node that makes the tiling of a mask; attentions with equal masks share it.

    length: of the attention's own sequence, which in a decoder beside an encoder is not the call's.
    """
    wanted: tuple[Spec, ...] = decision.attributes["inputs"]
    op = ops.MaskTiling(
        reading.mask,
        tuple(item.dims for item in reading.inputs),
        whole=not decision.attributes["tokens"],
        padded=context.mesh.pads,
    )
    key = (op, tuple(item.node for item in reading.inputs), tuple(wanted), length)
    if key not in context.tilings:
        context.tilings[key] = _tiling(graph, op, reading, wanted, made, context, length)
    return context.tilings[key]


def _tiling(
    graph: Graph,
    op: ops.MaskTiling,
    reading: PairReading,
    wanted: Sequence[Spec],
    made: Redistributor,
    context: LoweringContext,
    length: Size,
) -> Node:
    nodes = [item.node for item in reading.inputs]
    before = _after(graph, nodes)
    assert context.placement is not None
    given = []
    for node, want in zip(nodes, wanted, strict=True):
        have = context.placement.native[node]
        assert isinstance(have, Spec)
        given.append(made.get(node, have, want, before))
    total = made.size(length, before)
    # What another operation wanted in the same form, a length too, may have been made further down.
    made_here = [*given, total] if isinstance(total, Node) else given
    before = _after(graph, [*nodes, *made_here])
    with graph.inserting_before(before):
        tiling = graph.call_function(op, (total, *given))
    computed = [n for n in nodes if n.op != "placeholder"]
    scope = computed[-1].meta.get("nn_module_stack") if computed else None
    tiling.meta["nn_module_stack"] = dict(scope or {})
    return tiling


def _after(graph: Graph, nodes: Sequence[Node]) -> Node:
    """The first place where all of `nodes` and the sizes at the top are known."""
    waiting = set(nodes)
    for node in graph.nodes:
        top = node.op == "placeholder" or "root_size" in node.meta
        if not waiting and not top:
            return node
        waiting.discard(node)
    raise AssertionError("a mask that nothing uses")
