"""Parameters and inputs are replicated from outside: where their cotangents are summed."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Node

from seqcomp.capture.edit import is_tensor, scope_of
from seqcomp.lowering import ops
from seqcomp.lowering.context import Graph, LoweringContext
from seqcomp.lowering.fsdp_units import owner
from seqcomp.placement.spec import Spec

# Bytes. The first to be complete in backward is small, so that the ranks start early.
_FIRST_BUCKET = 2**20
_BUCKET = 25 * 2**20

Axes = tuple[str, ...]
Calls = tuple[str, ...]
"""Keys of nested module calls, the root's left out."""


@dataclass(frozen=True)
class Use:
    """A parameter, and the nodes that use it in one call of the unit that holds it."""

    node: Node
    users: tuple[Node, ...]


def sum_gradients_pass(graph: Graph, context: LoweringContext) -> Graph:
    """Sums cotangents over the axes that do not cut the value.

    Those of parameters go round in buckets, of which all are in the root's forward: a bucket then
    holds parameters of many modules, which get theirs as arguments. Frozen parameters are
    included: whether a gradient is wanted is asked at run time, so that they can be unfrozen.

    What FSDP shards it also sums, over all axes but the tensor axis. Buckets of that one are then
    opened in the calls of FSDP's units, where their parameters are whole.
    """
    if not context.grad and context.mesh.tensor is None:
        return graph
    assert context.placement is not None
    capture, order = context.capture, {n: i for i, n in enumerate(graph.nodes)}
    members: dict[tuple[Axes, object, Calls], list[Use]] = {}
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if not is_tensor(node) or not node.meta["val"].is_floating_point():
            continue
        spec = context.placement.native[node]
        assert isinstance(spec, Spec)
        axes = tuple(a for a in context.mesh.degrees if a not in spec.axes)
        if node.name in capture.parameters:
            if context.fsdp_units is not None:
                axes = tuple(a for a in axes if a == context.mesh.tensor)
            if axes and context.grad:
                for calls, use in _uses(node, context, order).items():
                    members.setdefault((axes, node.meta["val"].dtype, calls), []).append(use)
            elif context.mesh.tensor is not None:
                _per_scope(graph, node, ops.LocalPart(), order)
        elif axes and node.name in capture.inputs and node.meta["val"].requires_grad:
            _per_scope(graph, node, ops.SumGradient(axes, node.name), order)
    for (axes, _, calls), uses in members.items():
        for bucket in _buckets(uses, order):
            _insert(graph, bucket, axes, calls, order)
    return graph


def _users(node: Node, order: dict[Node, int]) -> list[Node]:
    return sorted((u for u in node.users if u.op != "output"), key=order.__getitem__)


def _uses(node: Node, context: LoweringContext, order: dict[Node, int]) -> dict[Calls, Use]:
    """The uses of a parameter by the calls in which its unit is called."""
    unit = owner(context.capture.state[node.name], context.fsdp_units or ())
    found: dict[Calls, list[Node]] = {}
    for user in _users(node, order):
        levels = scope_of(user.meta.get("nn_module_stack") or {})
        depth = next((i + 1 for i, (_, path) in enumerate(levels) if path == unit), 0)
        found.setdefault(tuple(key for key, _ in levels[:depth]), []).append(user)
    return {calls: Use(node, tuple(users)) for calls, users in found.items()}


def _buckets(uses: Iterable[Use], order: dict[Node, int]) -> list[list[Use]]:
    """Parameters in the order of their first use, cut from the end as backward completes them."""
    buckets: list[list[Use]] = []
    room = 0
    for use in sorted(uses, key=lambda use: order[use.users[0]], reverse=True):
        value = use.node.meta["val"]
        size = value.numel() * max(value.element_size(), 4) if value.requires_grad else 0
        if not buckets or size > room:
            room = _BUCKET if buckets else _FIRST_BUCKET
            buckets.append([])
        buckets[-1].insert(0, use)
        room -= size
    return buckets


def _insert(
    graph: Graph, bucket: list[Use], axes: Axes, calls: Calls, order: dict[Node, int]
) -> None:
    """Opens a bucket where the calls begin, and fills it before its first use."""
    top = next(n for n in graph.nodes if n.op != "placeholder" and _is_in(n, calls))
    stack = dict(top.meta.get("nn_module_stack") or {}) if calls else {}
    for key in [k for k in stack if str(k) not in calls and scope_of({k: stack[k]})]:
        del stack[key]
    with graph.inserting_before(top):
        opened = graph.call_function(
            ops.OpenBucket(axes, "gradients"), tuple(use.node for use in bucket)
        )
    # As late as it may be: the engine runs it as soon as the gradients are there.
    with graph.inserting_before(bucket[0].users[0]):
        filled = graph.call_function(ops.FillBucket(axes, "gradients"), (opened,))
        values = [graph.call_function(operator.getitem, (filled, i)) for i in range(len(bucket))]
    for new in (opened, filled, *values):
        new.meta["nn_module_stack"] = dict(stack)
    for use, value in zip(bucket, values, strict=True):
        value.meta["source"] = use.node
        for user in use.users:
            user.replace_input_with(use.node, value)


def _is_in(node: Node, calls: Calls) -> bool:
    levels = scope_of(node.meta.get("nn_module_stack") or {})
    return tuple(key for key, _ in levels[: len(calls)]) == calls


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
