"""Products over batch * heads become products over [batch, heads], where they came from.

`baddbmm(bias, q, k^T)` and `bmm(weights, v)` on [batch * heads, ...] (BLOOM) are then read like all
other attention.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor, is_tensor, op_name, transposed_dims
from seqcomp.capture.export import Capture
from seqcomp.capture.score_products import as_matmul
from seqcomp.capture.sizes import Size

aten = torch.ops.aten
_RESHAPES = ("aten.view", "aten.reshape", "aten._unsafe_view")
_ALIKE = ("aten.to", "aten.contiguous", "aten.clone", "aten.mul")


def flat_heads_pass(capture: Capture) -> None:
    """Rewrites products whose only user takes batch and heads apart again."""
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        name = op_name(node) if node.op == "call_function" else ""
        if name not in ("aten.baddbmm", "aten.bmm") or len(node.users) != 1:
            continue
        apart = next(iter(node.users))
        lead = _lead(capture, apart)
        if lead is None:
            continue
        operands = [_apart(capture, editor, n, lead, before=node) for n in node.args]
        if any(operand is None for operand in operands):
            continue
        *bias, left, right = operands
        editor.replace(apart, as_matmul(editor, node, bias, left, right))
        capture.graph.erase_node(node)


def _lead(capture: Capture, apart: Node) -> tuple[Size, Size] | None:
    """(batch, heads) where `apart` takes [batch * heads, m, n] to [batch, heads, m, n]."""
    if op_name(apart) not in _RESHAPES:
        return None
    shape, source = capture.shape(apart), capture.shape(apart.args[0])
    if len(shape) != 4 or shape[2:] != source[1:] or shape[0] * shape[1] != source[0]:
        return None
    return shape[0], shape[1]


def _apart(
    capture: Capture, editor: Editor, node: Node, lead: tuple[Size, Size], before: Node
) -> Node | None:
    """The value [batch or 1, heads, m, n] that `node` [batch * heads, m, n] was made of."""
    if not is_tensor(node) or node.op != "call_function":
        return None
    name, shape = op_name(node), capture.shape(node)
    if name in _RESHAPES:
        source = node.args[0]
        own = capture.shape(source)
        if own == (*lead, *shape[1:]):
            return source
        if own == (*lead, shape[2]) and shape[1] == 1:
            return editor.call(aten.unsqueeze.default, (source, 2), before=before)
        return None
    if name == "aten.repeat" and capture.shape(node.args[0]) == (lead[1], *shape[1:]):
        return editor.call(aten.unsqueeze.default, (node.args[0], 0), before=before)
    if transposed_dims(node) == (0, 2, 1):
        source = _apart(capture, editor, node.args[0], lead, before)
        return source and editor.call(aten.transpose.int, (source, 2, 3), before=before)
    if name in _ALIKE and not any(is_tensor(x) for x in node.args[1:]):
        source = _apart(capture, editor, node.args[0], lead, before)
        args = (source, *node.args[1:])
        return source and editor.call(node.target, args, dict(node.kwargs), before=before)
    return None
