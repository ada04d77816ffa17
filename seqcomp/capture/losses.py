"""Token losses in the global view: label shifts move to the labels, means become sum / count."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor, argument, is_tensor, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.sizes import LENGTH_SYMBOL

aten = torch.ops.aten

# Operations through which a slice of the sequence may move: each token on its own.
_TOKEN_WISE = {"aten.linear", "aten.contiguous", "aten.clone", "aten.to", "aten.rms_norm"}
_RESHAPES = {"aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten"}
_LOSSES = {"aten.cross_entropy_loss", "aten.nll_loss_nd"}


def shift_labels_pass(capture: Capture) -> None:
    """cross_entropy(f(x[:, :-k]), y[:, k:]) -> cross_entropy(f(x), y padded with ignore_index).

    The same sum and the same count of valid labels, but no slice along the sequence of an
    activation: labels are integers on the global sequence, where shifting costs nothing.
    """
    for node in list(capture.graph.nodes):
        if node.op == "call_function" and op_name(node) in _LOSSES:
            _move_shift(capture, node)


def _move_shift(capture: Capture, loss: Node) -> None:
    reduction = argument(loss, 3, "reduction", 1)
    target = loss.args[1]
    if reduction == 0 or not is_tensor(target) or target.meta["val"].is_floating_point():
        return
    if loss.args[0].meta["val"].ndim != 2:
        return  # dim 1 is the classes there
    chain: list[Node] = []
    node = loss.args[0]
    while is_tensor(node) and len(node.users) == 1 and _moves_through(node):
        chain.append(node)
        node = node.args[0]
    if not is_tensor(node) or node.op != "call_function" or op_name(node) != "aten.slice":
        return
    source = node.args[0]
    dim, start = _slice_start(node)
    dim %= source.meta["val"].ndim
    full, cut = capture.shape(source), capture.shape(node)
    if dim == source.meta["val"].ndim - 1 or not full[dim].has(LENGTH_SYMBOL) or start < 0:
        return
    missing_right = sympy.expand(full[dim] - cut[dim] - start)
    if not missing_right.is_Integer:
        return
    if argument(node, 4, "step", 1) != 1:
        return
    editor = Editor(capture)
    labels = _padded_labels(capture, editor, loss, cut[:dim], cut[dim], start, int(missing_right))
    if labels is None:
        return
    value = source
    for step in reversed(chain):
        args = [value, *step.args[1:]]
        if op_name(step) in _RESHAPES:
            shape = [-1, step.meta["val"].shape[-1]]
            value = editor.call(aten.reshape.default, (value, shape), before=loss, like=step)
        else:
            value = editor.call(step.target, args, step.kwargs, before=loss, like=step)
    loss.replace_input_with(loss.args[0], value)
    loss.replace_input_with(target, labels)


def _moves_through(node: Node) -> bool:
    if node.op != "call_function":
        return False
    name = op_name(node)
    if name in _RESHAPES:
        return len(node.meta["val"].shape) == 2
    if name in _TOKEN_WISE:
        return True
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.pointwise in node.target.tags
        and sum(is_tensor(a) for a in node.args) == 1
    )


def _slice_start(node: Node) -> tuple[int, int]:
    """(dim, start); a start that is not a plain number is -1."""
    start = argument(node, 2, "start", 0) or 0
    return argument(node, 1, "dim", 0), start if isinstance(start, int) else -1


def _padded_labels(
    capture: Capture,
    editor: Editor,
    loss: Node,
    lead: tuple[Any, ...],
    cut: Any,
    left: int,
    right: int,
) -> Node | None:
    target = loss.args[1]
    ignore = argument(loss, 4, "ignore_index", -100)
    flat = sympy.expand(sympy.prod(lead) * cut)
    shape = capture.shape(target)
    value = target
    if shape == (flat,) and len(lead) == 1:
        before = _before_flatten(capture, target, (*lead, cut))
        if before is None:
            return None
        value = before
    elif shape != (*lead, cut):
        return None
    dim, dtype = len(lead), target.meta["val"].dtype
    if value.meta["val"].dtype != dtype:
        value = editor.call(aten.to.dtype, (value, dtype), before=loss)
    # pad would do, but it specialises symbolic sizes on fake tensors
    like = editor.call(aten.slice.Tensor, (value, dim, 0, 1), before=loss)
    filled = editor.call(aten.full_like.default, (like, ignore), before=loss)
    parts = [*[filled] * left, value, *[filled] * right]
    padded = editor.call(aten.cat.default, (parts, dim), before=loss)
    if shape == (flat,):
        padded = editor.call(aten.reshape.default, (padded, [-1]), before=loss)
    return padded


def _before_flatten(capture: Capture, target: Node, shape: tuple[Any, ...]) -> Node | None:
    node = target
    while is_tensor(node) and node.op == "call_function":
        if capture.shape(node) == shape:
            return node
        if op_name(node) not in _RESHAPES | {"aten.contiguous", "aten.to", "aten.clone"}:
            return None
        node = node.args[0]
    return node if is_tensor(node) and capture.shape(node) == shape else None


def mean_loss_pass(capture: Capture) -> None:
    """A mean token loss becomes sum / count, both over the global batch.

    The count is taken from the labels alone (weights included), so that it needs no activation.
    The mean of per-rank means is another number as soon as valid labels are spread unevenly.
    """
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        if node.op != "call_function" or op_name(node) not in _LOSSES:
            continue
        if argument(node, 3, "reduction", 1) != 1:
            continue
        logits, target = node.args[:2]
        weight = argument(node, 2, "weight")
        ignore = argument(node, 4, "ignore_index", -100)
        classes = logits.meta["val"].shape[1 if logits.meta["val"].ndim > 1 else 0]
        rest = list(node.args[4:])
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("weight", "reduction")}
        dtype = node.meta["val"].dtype
        wide = torch.float32 if dtype.itemsize < 4 else dtype  # sums of many tokens overflow half
        total = editor.call(
            node.target, (logits, target, weight, 2 if wide == dtype else 0, *rest), kwargs,
            before=node,
        )  # fmt: skip
        if wide != dtype:
            total = editor.call(aten.sum.default, (total,), {"dtype": wide}, before=node)
        if target.meta["val"].is_floating_point():
            ones = editor.call(aten.ones_like.default, (target,), before=node)
            number = editor.call(aten.sum.default, (ones,), before=node)
            count = editor.call(aten.div.Scalar, (number, classes), before=node)
        else:
            valid = editor.call(aten.ne.Scalar, (target, ignore), before=node)
            if weight is not None:
                safe = editor.call(aten.mul.Tensor, (target, valid), before=node)
                each = editor.call(aten.embedding.default, (_column(editor, weight, node), safe),
                                   before=node)  # fmt: skip
                flat = editor.call(aten.squeeze.dim, (each, -1), before=node)
                valid = editor.call(aten.mul.Tensor, (flat, valid), before=node)
            count = editor.call(aten.sum.default, (valid,), before=node)
        count = editor.call(aten.to.dtype, (count, wide), before=node)
        mean = editor.call(aten.div.Tensor, (total, count), before=node)
        if wide != dtype:
            mean = editor.call(aten.to.dtype, (mean, dtype), before=node)
        editor.replace(node, mean)


def _column(editor: Editor, weight: Node, before: Node) -> Node:
    return editor.call(aten.unsqueeze.default, (weight, 1), before=before)
