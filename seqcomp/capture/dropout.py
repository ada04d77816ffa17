"""Dropout as a function of a key: in the captured graph every mask is a value, not an event."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from seqcomp.capture.edit import Editor, argument, op_name, place_of
from seqcomp.capture.export import Capture
from seqcomp.capture.kinds import DROPOUTS, is_off
from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.runtime import random

_ATTENTION = "aten.scaled_dot_product_attention"
BY_CHANNEL = 2  # dims of [N, C, ...] whose elements share the fate of their channel


@dataclass(frozen=True)
class Dropped:
    """Dropout of attention's probabilities: with probability `p`, the `number`-th of the call."""

    p: float
    number: int


def keyed_dropout(x: Tensor, keys: Tensor, number: int, p: float, dims: int) -> Tensor:
    """The operation that dropout nodes stand for, on one device.

    keys: of all dropouts of the call, int64 [n, 2]; dims: how many of x's tell elements apart.
    """
    sizes = x.shape[:dims]
    index = [torch.arange(size, device=x.device) for size in sizes]
    return random.dropout(x, keys[number], index, sizes, p)


def keyed_dropout_pass(capture: Capture) -> None:
    """Numbers every dropout that is on, in the order of the calls, and gives it its key.

    Those inside attention are left as a note on the node, for whoever reads the attention.
    """
    found = [n for n in capture.graph.nodes if n.op == "call_function" and _is_on(n)]
    if not found:
        return
    keys, editor = _keys(capture, len(found)), Editor(capture)
    for number, node in enumerate(found):
        if op_name(node) == _ATTENTION:
            node.meta["dropped"] = Dropped(float(argument(node, 4, "dropout_p")), number)
            continue
        x, p = node.args[0], float(node.args[1])
        dims = x.meta["val"].ndim
        if op_name(node).startswith("aten.feature_"):
            dims = min(dims, BY_CHANNEL)
        new = editor.call(keyed_dropout, (x, keys, number, p, dims), before=node)
        editor.replace(node, new)
    capture.dropouts = len(found)


def refuse_unread_attention(capture: Capture) -> None:
    """SC304 for attention with dropout that is in no form that is read."""
    found = [n for n in capture.graph.nodes if "dropped" in n.meta and op_name(n) == _ATTENTION]
    if found:
        raise PlanError(
            [
                diagnostic(
                    "SC304",
                    where=place_of(node),
                    found=f"dropout_p={node.meta['dropped'].p} on {node.meta['val'].ndim} dims",
                    legal="scaled_dot_product_attention on [batch, heads, tokens, features]",
                    help="give it 4 dims, or set config.attention_dropout = 0.0",
                )
                for node in found
            ]
        )


def _is_on(node: Node) -> bool:
    if op_name(node) == _ATTENTION:
        return bool(argument(node, 4, "dropout_p", 0.0) > 0)
    return op_name(node) in DROPOUTS and not is_off(node)


def _keys(capture: Capture, count: int) -> Node:
    """A new input of the graph, behind all others."""
    first = next(n for n in capture.graph.nodes if n.op != "placeholder")
    with capture.graph.inserting_before(first):
        node = capture.graph.placeholder("dropout_keys")
    with capture.fake_mode:
        node.meta["val"] = torch.empty(count, 2, dtype=torch.int64, device=_device(capture))
    node.meta["ours"] = True
    capture.dropout_keys = node.name
    return node


def _device(capture: Capture) -> torch.device:
    values = (n.meta.get("val") for n in capture.graph.nodes if n.op == "placeholder")
    return next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
