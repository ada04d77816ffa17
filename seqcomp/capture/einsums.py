"""Products of heads written as einsum become matmul between permutations.

`einsum('bqhd,bkhd->bhqk', q, k)` and `einsum('bhqk,bkhd->bqhd', weights, v)` are then read like
all other attention, and so are products in which keys have no letter for the queries that share
them (`bqhgd,bkhd->bhgqk`, `bqhd,bkd->bhqk`). All others stay as they are.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.score_products import is_weights, makes_scores
from seqcomp.capture.sizes import Size

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """out = left @ right: letters in front, one of each alone, and the one summed over.

    left, right: (the operand, its letters); `rows` is of the left, `columns` of the right one.
    An operand that lacks a letter of `lead` is the same for all of it.
    """

    left: tuple[Node, str]
    right: tuple[Node, str]
    out: str
    lead: str
    rows: str
    columns: str
    summed: str


def einsums_pass(capture: Capture) -> None:
    """Rewrites products over two shared letters, one summed and one of each operand alone; in
    attention also those over one or more, of which an operand may lack some."""
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        if node.op != "call_function" or op_name(node) != "aten.einsum":
            continue
        found = _read(capture, node)
        if found is None:
            continue
        left = _in_order(editor, found.left, found.lead, found.rows + found.summed, node)
        right = _right(editor, found, node)
        new = editor.call(aten.matmul.default, (left, right), before=node)
        made = found.lead + found.rows + found.columns
        order = [made.index(name) for name in found.out]
        if order != sorted(order):
            new = editor.call(aten.permute.default, (new, order), before=node)
        editor.replace(node, new)


def _read(capture: Capture, node: Node) -> Product | None:
    operands = node.args[1]
    letters = _letters(node.args[0], operands)
    if len(letters) != 3 or any(len(set(names)) != len(names) for names in letters):
        return None
    one, two, out = letters
    sizes: dict[str, Size] = {}
    for names, operand in zip((one, two), operands, strict=True):
        for name, size in zip(names, capture.shape(operand), strict=True):
            if sizes.setdefault(name, size) != size:
                return None  # a dim of 1 that is broadcast
    shared = {n for n in out if n in one and n in two}
    summed = [n for n in (*one, *two) if n not in out]
    if not shared or len(summed) != 2 or summed[0] != summed[1]:
        return None
    if set(out) != ({*one, *two} - {*summed}):
        return None
    left, right = (operands[0], one), (operands[1], two)
    if next((n for n in out if n not in shared), "") not in one:
        left, right = right, left
    of_heads = len(one) == len(two) == len(out) == 4 and len(shared) == 2
    weights = is_weights(left[0])
    if not (of_heads or weights or makes_scores(node)):
        return None
    # Rows and columns are what each has alone, the last of it in scores: out or left.
    order = left[1] if weights else out
    rows = [n for n in order if n in left[1] and n not in (*shared, *summed)]
    columns = [n for n in out if n in right[1] and n not in shared]
    if not rows or len(columns) != 1:
        return None
    ends = (rows[-1], columns[0], summed[0])
    lead = "".join(n for n in order if n not in ends)
    return Product(left, right, out, lead, *ends)


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
    """[lead, summed, columns]; keys [.., columns, summed] are turned last, as k^T is written."""
    names = found.right[1]
    if names.index(found.summed) < names.index(found.columns):
        return _in_order(editor, found.right, found.lead, found.summed + found.columns, before)
    plain = _in_order(editor, found.right, found.lead, found.columns + found.summed, before)
    return editor.call(aten.transpose.int, (plain, -2, -1), before=before)


def _in_order(editor: Editor, value: tuple[Node, str], lead: str, last: str, before: Node) -> Node:
    """The value with dims `lead` and `last`, of size 1 for those of `lead` that it lacks."""
    node, names = value
    order = [names.index(name) for name in lead + last if name in names]
    if order != sorted(order):
        node = editor.call(aten.permute.default, (node, order), before=before)
    for index, name in enumerate(lead):
        if name not in names:
            node = editor.call(aten.unsqueeze.default, (node, index), before=before)
    return node
