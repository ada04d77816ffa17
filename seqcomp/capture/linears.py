"""Linear layers in one form, whatever they were written as.

`addmm(bias, x.view(-1, in), weight)` with a weight [in, out] (Conv1D of transformers), `x @ weight`
or `x @ weight.T`, and a linear between two views that flatten and restore its tokens all become
`linear(x [..., in], weight [out, in], bias)` on the tokens as they are.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor, is_tensor, op_name, transposed_dims
from seqcomp.capture.export import Capture

aten = torch.ops.aten

_RESHAPES = ("aten.view", "aten.reshape", "aten._unsafe_view")


def linears_pass(capture: Capture) -> None:
    """Products with a parameter become linears, and linears take their tokens unflattened."""
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        parts = _product(capture, node) if is_tensor(node) else None
        if parts is not None:
            x, weight, bias = parts
            turned = _untransposed(weight)
            if turned is None:
                turned = editor.call(aten.t.default, (weight,), before=node)
            args = (x, turned) if bias is None else (x, turned, bias)
            editor.replace(node, editor.call(aten.linear.default, args, before=node))
    for node in list(capture.graph.nodes):
        if node.op == "call_function" and op_name(node) == "aten.linear":
            _unflatten(capture, editor, node)


def _product(capture: Capture, node: Node) -> tuple[Node, Node, Node | None] | None:
    """(x, weight [in, out], bias) of a product with a parameter."""
    name = op_name(node)
    if name == "aten.addmm" and len(node.args) == 3 and not node.kwargs:
        bias, x, weight = node.args
        if bias.meta["val"].ndim != 1 or capture.shape(bias)[0] != capture.shape(node)[-1]:
            return None
    elif name in ("aten.mm", "aten.matmul", "aten.__matmul__"):
        bias, (x, weight) = None, node.args
    else:
        return None
    stored = _untransposed(weight) or weight
    if stored.op != "placeholder" or stored.name not in capture.parameters:
        return None
    fits = weight.meta["val"].ndim == 2 and x.meta["val"].ndim >= 2 and x is not stored
    return (x, weight, bias) if fits else None


def _untransposed(matrix: Node) -> Node | None:
    """What `matrix` is the transpose of."""
    return matrix.args[0] if transposed_dims(matrix) == (1, 0) else None


def _unflatten(capture: Capture, editor: Editor, linear: Node) -> None:
    """linear(x.view(-1, in)).view(*tokens, out) -> linear(x.view(*tokens, in))."""
    flat = linear.args[0]
    if op_name(flat) not in _RESHAPES or flat.meta["val"].ndim != 2:
        return
    users = [n for n in linear.graph.nodes if n in linear.users]
    shapes = {capture.shape(u) for u in users if op_name(u) in _RESHAPES}
    if len(shapes) != 1 or any(op_name(u) not in _RESHAPES for u in users):
        return
    x, (shape,) = flat.args[0], shapes
    if len(shape) < 3 or shape[-1] != capture.shape(linear)[-1]:
        return
    width = capture.shape(flat)[-1]
    if capture.shape(x) != (*shape[:-1], width):
        if not width.is_Integer:
            return
        # Not what torch knows it by, which may be an expression of a symbol that is a number here.
        sizes = [*users[0].args[1][:-1], int(width)]
        x = editor.call(aten.reshape.default, (x, sizes), before=users[0], like=linear)
    args = (x, *linear.args[1:])
    new = editor.call(linear.target, args, linear.kwargs, before=users[0], like=linear)
    for view in users:
        editor.replace(view, new)
    capture.graph.erase_node(linear)
