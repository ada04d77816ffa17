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

from seqcomp.capture.edit import Editor, op_name
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
