"""A linear head and the loss of its logits become one operation that runs in chunks of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from seqcomp.capture.edit import (
    argument,
    is_tensor,
    module_path,
    op_name,
    place_of,
    transposed_dims,
)
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.lowering import ops
from seqcomp.lowering.context import Graph, LoweringContext
from seqcomp.lowering.redistribute import common_scope

_SHAPES = {"aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten"}
_SAME = {"aten.contiguous", "aten.clone", "aten.alias"}
_CASTS = {"aten.to", "aten._to_copy"}
_OTHERWISE = (
    "set memory.loss_chunks: 1, or compute the logits by a linear, with element-wise operations "
    "alone between it and the loss"
)


def chunk_loss_pass(graph: Graph, context: LoweringContext) -> Graph:
    """Replaces head, what stands between, and loss by one `ChunkedLoss` for every such loss.

    Runs on local values, so that what it finds needs no exchange in between, whatever the plan.
    Raises PlanError SC118 for a cross-entropy that has no such form; a call without any loss is
    refused when it is made (an example call need not have labels).
    """
    if context.loss_chunks == 1:
        return graph
    losses = [n for n in graph.nodes if _is_loss(n)]
    for loss in losses:
        _replace(graph, context, loss, _match(graph, context, loss))
    if not losses and context.grad:
        context.unmet.append(_refusal("this call", "no cross-entropy", "pass the labels"))
    return graph


def _is_loss(node: Node) -> bool:
    return isinstance(node.target, ops.VocabularyLoss) or (
        node.op == "call_function" and op_name(node) == "aten.cross_entropy_loss"
    )


@dataclass(frozen=True)
class _Match:
    linear: Node
    steps: tuple[ops.Step, ...]


def _match(graph: Graph, context: LoweringContext, loss: Node) -> _Match:
    """The linear behind a loss, and the element-wise steps between them.

    Everything in between treats each token alone and keeps the order of tokens, so that rows of
    the linear are rows of the loss. Raises PlanError SC118 otherwise.
    """
    node, target = loss.args[:2]
    if _value(target).is_floating_point():
        raise PlanError([_refusal(place_of(loss), "targets that are probabilities", _OTHERWISE)])
    classes_last = _value(node).ndim <= 2
    steps: list[ops.Step] = []
    while isinstance(node, Node) and node.op == "call_function":
        if len(node.users) > 1:
            raise PlanError([_shared(graph, context, node, loss)])
        if isinstance(node.target, ops.ColumnLinear) or op_name(node) == "aten.linear":
            if classes_last:
                return _Match(node, tuple(reversed(steps)))
            break
        if _is_swap(node):
            classes_last = not classes_last
        elif not _keeps_rows(node, classes_last):
            step = _step(node)
            if step is None:
                found = f"{op_name(node)} between the head and the loss"
                raise PlanError([_refusal(place_of(node), found, _OTHERWISE)])
            steps.append(step)
        node = node.args[0]
    raise PlanError([_refusal(place_of(loss), "no linear head before the loss", _OTHERWISE)])


def _value(node: Node) -> torch.Tensor:
    """The global value of which the node is a part."""
    value: torch.Tensor = (node if "val" in node.meta else node.meta["source"]).meta["val"]
    return value


def _is_swap(node: Node) -> bool:
    """[B, s, V] <-> [B, V, s]."""
    return "val" in node.meta and transposed_dims(node) == (0, 2, 1)


def _keeps_rows(node: Node, classes_last: bool) -> bool:
    """Whether the node only says otherwise in which shape the same rows stand."""
    if op_name(node) in _SAME:
        return True
    if op_name(node) not in _SHAPES or not classes_last or "val" not in node.meta:
        return False
    before = node.args[0].meta.get("val")
    return before is not None and _last(before) == _last(node.meta["val"])


def _last(value: torch.Tensor) -> Any:
    size = value.shape[-1]
    return int(size) if isinstance(size, int) else str(size)


def _step(node: Node) -> ops.Step | None:
    """The node as a function of one tensor, element by element; None where it is none."""
    name = op_name(node)
    pointwise = name in _CASTS or (
        isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    )
    others = [*node.args[1:], *node.kwargs.values()]
    if not pointwise or not is_tensor(node.args[0]) or any(isinstance(x, Node) for x in others):
        return None
    return ops.Step(node.target, tuple(node.args[1:]), tuple(node.kwargs.items()))


def _replace(graph: Graph, context: LoweringContext, loss: Node, found: _Match) -> None:
    linear = found.linear
    x, *rest = linear.args
    if isinstance(linear.target, ops.ColumnLinear):
        shard, weight, bias, again = rest
    else:
        weight, bias = rest[0], rest[1] if len(rest) > 1 else None
        shard = again = None
    shared = loss.target if isinstance(loss.target, ops.VocabularyLoss) else None
    own = shared is None
    op = ops.ChunkedLoss(
        chunks=context.loss_chunks,
        steps=found.steps,
        shared=shared,
        ignore_index=argument(loss, 4, "ignore_index", -100) if own else 0,
        smoothing=argument(loss, 5, "label_smoothing", 0.0) if own else 0.0,
        reduce=argument(loss, 3, "reduction", 1) == 2 if shared is None else shared.reduce,
        dtype=loss.meta["val"].dtype,
    )
    args = (
        x,
        shard,
        weight,
        bias,
        again,
        loss.args[1],
        argument(loss, 2, "weight") if own else None,
    )
    with graph.inserting_before(loss):
        new = graph.call_function(op, args)
    new.meta.update(loss.meta)
    new.meta["nn_module_stack"] = common_scope(linear, loss)
    new.meta["head"] = module_path(linear)
    loss.replace_all_uses_with(new)
    context.replaced(loss, new)
    graph.erase_node(loss)


def _shared(graph: Graph, context: LoweringContext, node: Node, loss: Node) -> Diagnostic:
    names = list(_outputs_of(graph, context, node, loss))
    drop = ", ".join(f"{name}: drop" for name in names)
    return _refusal(
        place_of(node),
        f"logits that are also the output {', '.join(names)}" if names else "logits used elsewhere",
        f"outputs: {{{drop}}}" if names else _OTHERWISE,
    )


def _outputs_of(graph: Graph, context: LoweringContext, node: Node, loss: Node) -> Iterator[str]:
    """Outputs that are made of `node` by other ways than `loss`."""
    seen, waiting = {loss}, [node]
    while waiting:
        new = [user for user in waiting.pop().users if user not in seen]
        seen.update(new)
        waiting += new
    leaves = graph.output_node().args[0]
    for name, leaf in zip(context.capture.output_names, leaves, strict=True):
        if leaf is not loss and leaf in seen:
            yield name


def _refusal(where: str, found: str, fix: str) -> Diagnostic:
    return diagnostic(
        "SC118",
        where=where,
        found=found,
        legal="a linear, element-wise operations, and the cross-entropy of the whole result",
        help=fix,
    )
