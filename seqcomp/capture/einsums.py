"""Products of heads written as einsum become matmul between permutations.

`einsum('bqhd,bkhd->bhqk', q, k)` and `einsum('bhqk,bkhd->bqhd', weights, v)` are then read like
all other attention. What is no product of two operands [batch, heads, m, n] stays as it is.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor, argument, is_tensor, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.sizes import Size

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """out = left @ right: letters of both, one of each alone, and the one summed over.

    left, right: (the operand, its letters); `rows` is of the left, `columns` of the right one.
    """

    left: tuple[Node, str]
    right: tuple[Node, str]
    out: str
    shared: str
    rows: str
    columns: str
    summed: str


def einsums_pass(capture: Capture) -> None:
    """Rewrites products over two shared letters, one summed and one of each operand alone."""
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        if node.op != "call_function" or op_name(node) != "aten.einsum":
            continue
        found = _read(capture, node)
        if found is None:
            continue
        left = _in_order(editor, found.left, found.shared + found.rows + found.summed, node)
        right = _right(editor, found, node)
        new = editor.call(aten.matmul.default, (left, right), before=node)
        made = found.shared + found.rows + found.columns
        editor.replace(node, _in_order(editor, (new, made), found.out, node))


def heads_first_pass(capture: Capture) -> None:
    """Heads [B, S, H, d] that are repeated and then moved are moved and then repeated.

    Grouped queries are recognised by a repetition that comes last.
    """
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        order = _order(node) if node.op == "call_function" and is_tensor(node) else None
        found = _repeated(capture, node.args[0]) if order is not None and len(order) == 4 else None
        if order is None or found is None:
            continue
        source, count, dim = found
        if order[1] == dim != 1:
            moved = editor.call(node.target, (source, *node.args[1:]), before=node)
            again = editor.call(aten.repeat_interleave.self_int, (moved, count, 1), before=node)
            editor.replace(node, again)


def _repeated(capture: Capture, node: Node) -> tuple[Node, int, int] | None:
    """(source, count, dim) of what repeats each item of a dim."""
    if not is_tensor(node) or node.op != "call_function":
        return None
    if op_name(node) == "aten.repeat_interleave":
        dim = argument(node, 2, "dim")
        static = isinstance(node.args[1], int) and dim is not None
        return (node.args[0], node.args[1], dim % node.meta["val"].ndim) if static else None
    if op_name(node) not in ("aten.reshape", "aten.view", "aten._unsafe_view", "aten.flatten"):
        return None
    wide = node.args[0]
    if not is_tensor(wide) or op_name(wide) != "aten.expand":
        return None
    lifted = wide.args[0]
    if not is_tensor(lifted) or op_name(lifted) != "aten.unsqueeze":
        return None
    source, own = lifted.args[0], capture.shape(lifted.args[0])
    dim = lifted.args[1] % (len(own) + 1) - 1
    count = wide.meta["val"].shape[dim + 1]
    if dim < 0 or not isinstance(count, int):
        return None
    before, after = own[: dim + 1], own[dim + 1 :]
    joined = (*before[:-1], before[-1] * count, *after)
    is_so = capture.shape(wide) == (*before, count, *after) and capture.shape(node) == joined
    return (source, count, dim) if is_so else None


def _order(node: Node) -> list[int] | None:
    """The source's dim at each place of a transposition."""
    name, ndim = op_name(node), node.meta["val"].ndim
    if name == "aten.permute":
        return [d % ndim for d in node.args[1]]
    if name != "aten.transpose":
        return None
    order = list(range(ndim))
    a, b = node.args[1] % ndim, node.args[2] % ndim
    order[a], order[b] = b, a
    return order


def _read(capture: Capture, node: Node) -> Product | None:
    operands = node.args[1]
    letters = _letters(node.args[0], operands)
    if len(letters) != 3 or any(len(names) != 4 or len(set(names)) != 4 for names in letters):
        return None
    one, two, out = letters
    sizes: dict[str, Size] = {}
    for names, operand in zip((one, two), operands, strict=True):
        for name, size in zip(names, capture.shape(operand), strict=True):
            if sizes.setdefault(name, size) != size:
                return None  # a dim of 1 that is broadcast
    shared = "".join(n for n in out if n in one and n in two)
    summed = [n for n in one if n in two and n not in out]
    alone = [n for n in out if n not in shared]
    if len(shared) != 2 or len(summed) != 1:
        return None
    (left, right) = ((operands[0], one), (operands[1], two))
    if alone[0] not in one:
        left, right = right, left
    if alone[0] not in left[1] or alone[1] not in right[1]:
        return None
    return Product(left, right, out, shared, alone[0], alone[1], summed[0])


def _letters(equation: str, operands: Sequence[Node]) -> list[str]:
    """Those of each operand and of the result, `...` as letters of their own; [] if not given."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    hidden = {
        operand.meta["val"].ndim - len(own.replace("...", ""))
        for own, operand in zip(names, operands, strict=True)
        if "..." in own
    }
    if not arrow or len(hidden) > 1:
        return []
    unused = "".join(c for c in string.ascii_letters if c not in equation)
    dots = unused[: max(hidden, default=0)]
    return [own.replace("...", dots) for own in (*names, out)]


def _right(editor: Editor, found: Product, before: Node) -> Node:
    """[shared, summed, columns]; keys [.., columns, summed] are turned last, as k^T is written."""
    names = found.right[1]
    if names.index(found.summed) < names.index(found.columns):
        order = found.shared + found.summed + found.columns
        return _in_order(editor, found.right, order, before)
    plain = _in_order(editor, found.right, found.shared + found.columns + found.summed, before)
    return editor.call(aten.transpose.int, (plain, 2, 3), before=before)


def _in_order(editor: Editor, value: tuple[Node, str], order: str, before: Node) -> Node:
    node, names = value
    if names == order:
        return node
    permutation = [names.index(name) for name in order]
    return editor.call(aten.permute.default, (node, permutation), before=before)
