"""Heads that are repeated, so that there are as many keys and values as queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor, argument, is_tensor, op_name, transposed_dims
from seqcomp.capture.export import Capture

aten = torch.ops.aten

_JOINS = ("aten.reshape", "aten.view", "aten._unsafe_view", "aten.flatten")


@dataclass(frozen=True)
class Repeated:
    """Each item of a dim of `source` stands `count` times in a row."""

    source: Node
    count: int
    dim: int


def heads_first_pass(capture: Capture) -> None:
    """Heads [B, S, H, d] that are repeated and then moved are moved and then repeated.

    Grouped queries are recognised by a repetition that comes last.
    """
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        order = transposed_dims(node) if node.op == "call_function" and is_tensor(node) else None
        found = repeated(capture, node.args[0]) if order is not None and len(order) == 4 else None
        if order is None or found is None:
            continue
        if order[1] == found.dim != 1:
            moved = editor.call(node.target, (found.source, *node.args[1:]), before=node)
            repeats = (moved, found.count, 1)
            again = editor.call(aten.repeat_interleave.self_int, repeats, before=node)
            editor.replace(node, again)


def repeated(capture: Capture, node: Node) -> Repeated | None:
    """How a value repeats another: repeat_interleave, or a new dim that is expanded and joined."""
    if not is_tensor(node) or node.op != "call_function":
        return None
    if op_name(node) == "aten.repeat_interleave":
        dim, count = argument(node, 2, "dim"), node.args[1]
        static = isinstance(count, int) and dim is not None
        return Repeated(node.args[0], count, dim % node.meta["val"].ndim) if static else None
    if op_name(node) not in _JOINS:
        return None
    wide = _behind(node.args[0], ("aten.clone", "aten.contiguous"))
    if not is_tensor(wide) or op_name(wide) != "aten.expand":
        return None
    # x[:, :, None, :, :] is traced with whole slices.
    lifted = _behind(wide.args[0], ("aten.slice",))
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
    return Repeated(source, count, dim) if is_so else None


def _behind(node: Node, names: tuple[str, ...]) -> Node:
    while is_tensor(node) and op_name(node) in names:
        node = node.args[0]
    return node
