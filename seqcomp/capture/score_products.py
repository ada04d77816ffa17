"""The two products of attention, however they are called: q k^T before a softmax, weights v after.

bmm and baddbmm become matmul and add there, which is how attention that is written out is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor, argument, is_tensor, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.kinds import is_pointwise

aten = torch.ops.aten
_SOFTMAX = ("aten.softmax", "aten._softmax")


def bmm_pass(capture: Capture) -> None:
    """Rewrites those of attention; all others stay as they are."""
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        name = op_name(node) if node.op == "call_function" else ""
        if name not in ("aten.bmm", "aten.baddbmm"):
            continue
        *bias, left, right = node.args[:3]
        if not (makes_scores(node) or is_weights(left)):
            continue
        editor.replace(node, as_matmul(editor, node, bias, left, right))


def as_matmul(editor: Editor, node: Node, bias: Sequence[Node], left: Node, right: Node) -> Node:
    """left @ right, to which a baddbmm adds its bias, as new nodes before `node`."""
    new = editor.call(aten.matmul.default, (left, right), before=node)
    if not bias:
        return new
    alpha, beta = argument(node, 4, "alpha", 1), argument(node, 3, "beta", 1)
    new = new if alpha == 1 else editor.call(aten.mul.Tensor, (new, alpha), before=node)
    own = bias[0]
    own = own if beta == 1 else editor.call(aten.mul.Tensor, (own, beta), before=node)
    return editor.call(aten.add.Tensor, (new, own), before=node)


def makes_scores(node: Node) -> bool:
    """Whether a softmax is reached from this value element by element."""
    seen, work = {node}, [node]
    while work:
        for user in work.pop().users:
            if op_name(user) in _SOFTMAX:
                return True
            if user not in seen and is_pointwise(user):
                seen.add(user)
                work.append(user)
    return False


def is_weights(node: Node) -> bool:
    """Whether this is what a softmax gives, in any dtype, with or without dropout."""
    while is_tensor(node) and node.op == "call_function":
        if op_name(node) in _SOFTMAX:
            return True
        if op_name(node) not in ("aten.to", "aten.contiguous", "aten.clone", "keyed_dropout"):
            return False
        node = node.args[0]
    return False
