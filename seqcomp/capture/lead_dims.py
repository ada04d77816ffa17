"""Attention over other dims than [batch, heads]: as one over these, between views.

Scores [B * heads, S, S], and [B, KV heads, queries of each, S, S] whose keys stand once for all
queries of theirs, are then read like all other attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from seqcomp.capture.edit import Editor, argument, is_tensor, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.kinds import is_pointwise
from seqcomp.capture.sizes import Size

aten = torch.ops.aten
RESHAPES = ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten")
_FILLS: dict[str, float] = {"aten.zeros": 0.0, "aten.ones": 1.0}


def fused_lead_pass(capture: Capture) -> None:
    """scaled_dot_product_attention over other dims becomes one over [batch, heads]."""
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        name = op_name(node) if node.op == "call_function" else ""
        if name != "aten.scaled_dot_product_attention" or node.meta["val"].ndim == 4:
            continue
        q, k, v = node.args[:3]
        lead = lead_of(capture, q=q, k=k, v=v, product=node)
        if lead is None:
            continue
        q, k, v = (lead.view(editor, x, before=node) for x in (q, k, v))
        (mask,) = lead.of_scores(editor, argument(node, 3, "attn_mask"), before=node)
        options = {
            "dropout_p": argument(node, 4, "dropout_p", 0.0),
            "is_causal": argument(node, 5, "is_causal", False),
            "scale": argument(node, 6, "scale"),
            "enable_gqa": True,
        }
        new = editor.call(node.target, (q, k, v, mask), options, before=node)
        if "dropped" in node.meta:
            new.meta["dropped"] = node.meta["dropped"]
        editor.replace(node, lead.undo(editor, new, before=node))


@dataclass(frozen=True)
class Lead:
    """The dims in front of [rows, columns] and the views that make two of them, and undo it."""

    sizes: tuple[Size, ...]
    there: tuple[Any, ...]  # (operation, arguments behind the value)
    back: tuple[Any, ...]

    def view(self, editor: Editor, node: Node, before: Node) -> Node:
        target, *args = self.there
        return editor.call(target, (node, *args), before=before)

    def undo(self, editor: Editor, node: Node, before: Node) -> Node:
        target, *args = self.back
        return editor.call(target, (node, *args), before=before)

    def of_scores(self, editor: Editor, *masks: Node | None, before: Node) -> list[Node | None]:
        """What is added to all scores, or hides some: [B or 1, heads or 1, ..], as the scores.

        Operations on elements are done on what has these dims, so that a mask is read on through;
        what several masks are made of stays one value.
        """
        made: dict[Node, Node] = {}

        def four(node: Node) -> Node:
            if not is_tensor(node) or node.meta["val"].ndim <= 2:
                return node
            if node not in made:
                if node.op == "call_function" and is_pointwise(node):
                    args, kwargs = (map_arg(x, four) for x in (node.args, dict(node.kwargs)))
                    made[node] = editor.call(node.target, args, kwargs, before=before, like=node)
                else:
                    made[node] = self._of_leaf(editor, node, before)
            return made[node]

        return [mask and four(mask) for mask in masks]

    def _of_leaf(self, editor: Editor, node: Node, before: Node) -> Node:
        ndim, value = len(self.sizes) + 2, constant_of(node)
        if value is not None:
            options = {"dtype": node.meta["val"].dtype, "device": node.meta["val"].device}
            return editor.call(aten.full.default, ([1, 1], value), options, before=before)
        while node.meta["val"].ndim < ndim:
            node = editor.call(aten.unsqueeze.default, (node, 0), before=before)
        shape = editor.capture.shape(node)
        given, rest = shape[:-2], shape[-2:]
        if ndim == 3:
            if given[0] == 1:
                return editor.call(aten.unsqueeze.default, (node, 0), before=before)
            source = node.args[0] if op_name(node) in RESHAPES else None
            heads = self.there[2][1]
            if is_tensor(source) and editor.capture.shape(source)[1:] == (heads, *rest):
                return source
        elif all(size == 1 for size in given[1:]):
            dims = list(range(2, ndim - 2))
            return editor.call(aten.squeeze.dims, (node, dims), before=before)
        elif given[1:] != self.sizes[1:]:
            sizes = [-1, *(int(size) for size in self.sizes[1:]), -1, -1]
            node = editor.call(aten.expand.default, (node, sizes), before=before)
        return self.view(editor, node, before)


def lead_of(capture: Capture, *, q: Node, k: Node, v: Node, product: Node) -> Lead | None:
    """What stands in front of q [*lead, Sq, d], keys and values; None where they do not fit.

    product: weights @ v. Keys and values have the lead of the queries, or 1 in its last places.
    """
    shapes = [capture.shape(n) for n in (q, k, v, product)]
    sizes, own = (shape[:-2] for shape in shapes[:2])
    fits = len({len(shape) for shape in shapes}) == 1 and _are_shared(sizes, own)
    if not fits or shapes[2][:-1] != shapes[1][:-1] or shapes[3][:-2] != sizes:
        return None
    if len(sizes) == 1:
        heads = sizes[0] / capture.batch if capture.batch is not None else sizes[0]
        if not heads.is_Integer or heads <= 1:
            return None
        apart = (aten.unflatten.int, 0, [-1, int(heads)])
        return Lead(sizes, apart, (aten.flatten.using_ints, 0, 1))
    if not all(size.is_Integer for size in sizes[1:]):
        return None
    last = len(sizes) - 1
    apart = (aten.unflatten.int, 1, [int(size) for size in sizes[1:]])
    return Lead(sizes, (aten.flatten.using_ints, 1, last), apart)


def _are_shared(sizes: Sequence[Size], own: Sequence[Size]) -> bool:
    """Whether keys of these dims in front stand for the queries of those behind each other."""
    pairs = list(zip(sizes, own, strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return same > 0 and all(size == 1 for size in own[same:])


def between_views(capture: Capture, product: Node, lead: Lead) -> Node:
    """The product as [B, heads, Sq, dv]; what used it uses that, with its own dims again."""
    editor, after = Editor(capture), product.next
    out = lead.view(editor, product, before=after)
    own = lead.undo(editor, out, before=after)
    product.replace_all_uses_with(own, delete_user_cb=lambda user: user is not out)
    for node in (out, own):
        node.meta["nn_module_stack"] = dict(product.meta.get("nn_module_stack") or {})
    return out


def constant_of(node: Node) -> float | None:
    """The number of which a tensor is full."""
    name = op_name(node) if node.op == "call_function" else ""
    value = node.args[1] if name == "aten.full" else _FILLS.get(name)
    return value if isinstance(value, int | float) else None
