"""A sequence that no input has: tokens that the model makes itself, as patches of an image."""

from __future__ import annotations

import sympy
import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor, argument, module_path, op_name, transposed_dims
from seqcomp.capture.export import Capture
from seqcomp.capture.sizes import LENGTH_SYMBOL

aten = torch.ops.aten


def inner_sequence(capture: Capture) -> tuple[int, str] | None:
    """Its length and the module of its first attention, where all attentions of whole samples
    are over one sequence; None where there is none, and for attention over windows of a sample.
    """
    found: dict[int, str] = {}
    for node in capture.graph.nodes:
        if op_name(node) != "attention":
            continue
        (samples, _, rows, _), columns = capture.shape(node.args[0]), capture.shape(node.args[1])[2]
        if rows != columns:
            continue  # between sequences: queries of a pooling, a second modality
        if not rows.is_Integer or (capture.batch is not None and samples != capture.batch):
            return None
        found.setdefault(int(rows), module_path(node) or "<root>")
    return next(iter(found.items())) if len(found) == 1 else None


def name_length(capture: Capture, length: int) -> None:
    """Makes the number `length` the symbol S, of which parts may be padded.

    Another dim that happens to be of this size is then taken for one of tokens, which costs
    gathers and changes no value.
    """
    capture.canonical[sympy.Integer(length)] = capture.length = LENGTH_SYMBOL
    capture.hints[LENGTH_SYMBOL] = length
    for node in capture.graph.nodes:
        node.meta.pop("sc_shape", None)


def patches_pass(capture: Capture, length: int) -> None:
    """A convolution of patches that do not overlap is a linear on each of them.

    conv2d(image).flatten(2).transpose(1, 2) of `length` tokens: as a linear its work is cut by
    tokens, where each rank would make all patches otherwise.
    """
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        if op_name(node) == "aten.conv2d" and (out := _tokens_of(node, length)) is not None:
            editor.replace(out, _linear(editor, node, out))
    capture.graph.eliminate_dead_code()


def _tokens_of(conv: Node, length: int) -> Node | None:
    """[B, H, W] of features turned into [B, tokens, features], the only use of `conv`."""
    image, weight = conv.args[:2]
    _, _, *kernel = weight.meta["val"].shape
    plain = (
        list(argument(conv, 3, "stride", [1, 1])) == kernel
        and list(argument(conv, 4, "padding", [0, 0])) == [0, 0]
        and list(argument(conv, 5, "dilation", [1, 1])) == [1, 1]
        and argument(conv, 6, "groups", 1) == 1
        and all(
            isinstance(n, int) and n % k == 0
            for n, k in zip(image.meta["val"].shape[2:], kernel, strict=True)
        )
    )
    if not plain or len(conv.users) != 1:
        return None
    (flat,) = conv.users
    shape = (*conv.meta["val"].shape[:2], length)
    if op_name(flat) not in ("aten.flatten", "aten.view", "aten.reshape"):
        return None
    if tuple(flat.meta["val"].shape) != shape or len(flat.users) != 1:
        return None
    (turned,) = flat.users
    return turned if transposed_dims(turned) == (0, 2, 1) else None


def _linear(editor: Editor, conv: Node, out: Node) -> Node:
    image, weight = conv.args[:2]
    bias = argument(conv, 2, "bias")
    (_, _, *size), (_, _, *kernel) = image.meta["val"].shape, weight.meta["val"].shape

    def made(op: torch._ops.OpOverload, *args: object) -> Node:
        return editor.call(op, args, before=conv)

    x = made(aten.unflatten.int, image, 3, [size[1] // kernel[1], kernel[1]])
    x = made(aten.unflatten.int, x, 2, [size[0] // kernel[0], kernel[0]])
    x = made(aten.permute.default, x, [0, 2, 4, 1, 3, 5])
    x = made(aten.flatten.using_ints, x, 3, 5)
    x = made(aten.flatten.using_ints, x, 1, 2)
    flat = made(aten.flatten.using_ints, weight, 1, 3)
    args = (x, flat) if bias is None else (x, flat, bias)
    return editor.call(aten.linear.default, args, before=conv)
