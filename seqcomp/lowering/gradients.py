"""Parameters and inputs are replicated from outside: where their cotangents are summed."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch.fx import Node

from seqcomp.capture.edit import is_tensor
from seqcomp.lowering import ops
from seqcomp.lowering.context import Graph, LoweringContext
from seqcomp.placement.spec import Spec

# Bytes. The first to be complete in backward is small, so that the ranks start early.
_FIRST_BUCKET = 2**20
_BUCKET = 25 * 2**20

Axes = tuple[str, ...]


def sum_gradients_pass(graph: Graph, context: LoweringContext) -> Graph:
    """Sums cotangents over the axes that do not cut the value.

    Those of parameters go round in buckets, of which all are in the root's forward: a bucket then
    holds parameters of many modules, which get theirs as arguments. Frozen parameters are
    included: whether a gradient is wanted is asked at run time, so that they can be unfrozen.
    """
    if not context.grad and context.mesh.tensor is None:
        return graph
    assert context.placement is not None
    capture, order = context.capture, {n: i for i, n in enumerate(graph.nodes)}
    members: dict[tuple[Axes, object], list[Node]] = {}
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if not is_tensor(node) or not node.meta["val"].is_floating_point():
            continue
        spec = context.placement.native[node]
        assert isinstance(spec, Spec)
        axes = tuple(a for a in context.mesh.degrees if a not in spec.axes)
        if node.name in capture.parameters:
            if axes and context.grad:
                members.setdefault((axes, node.meta["val"].dtype), []).append(node)
            elif context.mesh.tensor is not None:
                _per_scope(graph, node, ops.LocalPart(), order)
        elif axes and node.name in capture.inputs and node.meta["val"].requires_grad:
            _per_scope(graph, node, ops.SumGradient(axes, node.name), order)
    for (axes, _), nodes in members.items():
        for bucket in _buckets(nodes, order):
            _insert(graph, bucket, axes, order)
    return graph


def _users(node: Node, order: dict[Node, int]) -> list[Node]:
    return sorted((u for u in node.users if u.op != "output"), key=order.__getitem__)


def _buckets(nodes: Iterable[Node], order: dict[Node, int]) -> list[list[Node]]:
    """Parameters in the order of their first use, cut from the end as backward completes them."""
    used = [n for n in nodes if _users(n, order)]
    used.sort(key=lambda n: order[_users(n, order)[0]], reverse=True)
    buckets: list[list[Node]] = []
    room = 0
    for node in used:
        value = node.meta["val"]
        size = value.numel() * max(value.element_size(), 4) if value.requires_grad else 0
        if not buckets or size > room:
            room = _BUCKET if buckets else _FIRST_BUCKET
            buckets.append([])
        buckets[-1].insert(0, node)
        room -= size
    return buckets


def _insert(graph: Graph, bucket: list[Node], axes: Axes, order: dict[Node, int]) -> None:
    users = {node: _users(node, order) for node in bucket}
    top = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(top):
        opened = graph.call_function(ops.OpenBucket(axes, "gradients"), tuple(bucket))
    opened.meta["nn_module_stack"] = {}
    # As late as it may be: the engine runs it as soon as the gradients are there.
    with graph.inserting_before(users[bucket[0]][0]):
        filled = graph.call_function(ops.FillBucket(axes, "gradients"), (opened,))
        values = [graph.call_function(operator.getitem, (filled, i)) for i in range(len(bucket))]
    for new in (filled, *values):
        new.meta["nn_module_stack"] = {}
    for node, value in zip(bucket, values, strict=True):
        value.meta["source"] = node
        for user in users[node]:
            user.replace_input_with(node, value)


def _per_scope(graph: Graph, node: Node, op: ops.Op, order: dict[Node, int]) -> None:
    made: dict[str, Node] = {}
    for user in _users(node, order):
        # One per module that uses the value, inside that module's own forward.
        key = str(list((user.meta.get("nn_module_stack") or {}).items()))
        if key not in made:
            with graph.inserting_before(user):
                made[key] = graph.call_function(op, (node,))
            made[key].meta["nn_module_stack"] = dict(user.meta.get("nn_module_stack") or {})
        user.replace_input_with(node, made[key])
