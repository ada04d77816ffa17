"""In-place operations of a capture become plain ones of the same value."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import pairwise

import sympy
import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor, argument, is_tensor, op_name, place_of
from seqcomp.capture.export import Capture
from seqcomp.capture.kinds import DROPOUTS, OTHER_DROPOUTS, is_off
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic

aten = torch.ops.aten

_FRESH = {"aten.empty", "aten.new_empty", "aten.empty_like", "aten.zeros", "aten.new_zeros",
          "aten.zeros_like"}  # fmt: skip


def filled_buffers_pass(capture: Capture) -> None:
    """x = empty(...); x[..., :n] = a; x[..., n:] = b  ->  cat((a, b), -1)."""
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        if node.op == "call_function" and op_name(node) in _FRESH:
            _filled(capture, editor, node)


def _filled(capture: Capture, editor: Editor, buffer: Node) -> None:
    """Replaces a new tensor that slices fill from end to end before anything reads it."""
    copies: list[Node] = []
    parts: list[Node] = []
    dims, at, order = set(), sympy.Integer(0), {n: i for i, n in enumerate(capture.graph.nodes)}
    for part in buffer.users:
        writes = [user for user in part.users if op_name(user) == "aten.copy_"]
        if op_name(part) != "aten.slice" or not writes:
            break
        if len(part.users) > 1 or writes[0].users or writes[0].args[0] is not part:
            return
        parts, copies = [*parts, part], [*copies, writes[0]]
    if not copies:
        return
    last = max(copies, key=order.__getitem__)
    readers = [user for user in buffer.users if user not in parts]
    if any(order[reader] < order[last] for reader in readers):
        return
    for part in parts:
        dim = argument(part, 1, "dim", 0) % buffer.meta["val"].ndim
        start, step = argument(part, 2, "start", 0), argument(part, 4, "step", 1)
        dims.add(dim)
        if len(dims) > 1 or step != 1 or start != at:
            return
        at += capture.shape(part)[dim]
    dim = dims.pop()
    if sympy.expand(at - capture.shape(buffer)[dim]) != 0:
        return
    values = [
        _as_part(capture, editor, copy, part, last)
        for copy, part in zip(copies, parts, strict=True)
    ]
    new = editor.call(aten.cat.default, (values, dim), before=last)
    for copy in copies:
        capture.graph.erase_node(copy)
    for reader in readers:
        reader.replace_input_with(buffer, new)


def _as_part(capture: Capture, editor: Editor, copy: Node, part: Node, before: Node) -> Node:
    """What `copy` writes, in the shape and dtype of the part that it writes to."""
    value = copy.args[1]
    dtype = part.meta["val"].dtype
    if value.meta["val"].dtype != dtype:
        value = editor.call(aten.to.dtype, (value, dtype), before=before)
    if capture.shape(value) != capture.shape(part):
        value = editor.call(aten.expand_as.default, (value, part), before=before)
    return value


def functional_pass(capture: Capture) -> None:
    """x.op_(y) becomes x.op(y) where nothing else can see the change; otherwise refused."""
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        schema = node.target._schema
        if not schema.is_mutable:
            continue
        if op_name(node) in (*DROPOUTS, *OTHER_DROPOUTS) and is_off(node):
            continue
        base = node.args[0]
        if _write_part(capture, editor, node):
            continue
        later = _later_users(base, node) if isinstance(base, Node) else []
        new = None
        if (
            isinstance(base, Node)
            and _is_owned(base)
            and not any(_may_alias(user) for user in base.users if user not in (node, *later))
        ):
            new = _plain(capture, editor, node)
        if new is None and isinstance(base, Node) and base.name in capture.state:
            raise PlanError([_changed_buffer(node, capture.state[base.name])])
        if new is None:
            raise PlanError(
                [
                    diagnostic(
                        "SC307",
                        where=place_of(node),
                        found=f"the in-place operation {node.target}",
                        legal="in-place operations on values that nothing else aliases",
                        help="use the out-of-place form",
                    )
                ]
            )
        for user in later:
            user.replace_input_with(base, new)
        editor.replace(node, new)


def _changed_buffer(node: Node, name: str) -> Diagnostic:
    return diagnostic(
        "SC307",
        where=place_of(node),
        found=f"forward changes {name}",
        legal="buffers and parameters that stay as they are",
        help="run the module in eval mode; batch norm: track_running_stats=False",
    )


def _write_part(capture: Capture, editor: Editor, node: Node) -> bool:
    """x[.., a:b] = y, x[.., i] = y: x becomes a copy with that part; False for other writes."""
    chain = [node.args[0]]
    while is_tensor(chain[-1]) and op_name(chain[-1]) in _SCATTERS:
        chain.append(chain[-1].args[0])
    if len(chain) == 1 or not is_tensor(chain[-1]) or not _is_owned(chain[-1]):
        return False
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    later = {item: [u for u in item.users if order[u] > order[node]] for item in chain}
    for item in chain:
        known = {node, *chain, *later[item]}
        if any(_is_read(user, node, order) for user in item.users if user not in known):
            return False
    new = _plain(capture, editor, node)
    if new is None:
        return False
    node.replace_all_uses_with(new)
    for part, whole in pairwise(chain):
        for user in later[part]:
            user.replace_input_with(part, new)
        scatter = _SCATTERS[op_name(part)]
        new = editor.call(scatter, (whole, new, *part.args[1:]), before=node)
    for user in later[chain[-1]]:
        user.replace_input_with(chain[-1], new)
    capture.graph.erase_node(node)
    return True


def _plain(capture: Capture, editor: Editor, node: Node) -> Node | None:
    """The value of what the in-place operation `node` writes to, afterwards; None if unknown."""
    base, name = node.args[0], op_name(node)
    if name == "aten.copy_" or (name == "aten.fill_" and is_tensor(node.args[1])):
        value = _as_part(capture, editor, node, base, node)
        return editor.call(aten.clone.default, (value,), before=node)
    if name == "aten.fill_":
        return editor.call(aten.full_like.default, (base, node.args[1]), before=node)
    schema = node.target._schema
    plain = getattr(aten, schema.name.removeprefix("aten::").rstrip("_"), None)
    overload = getattr(plain, node.target._overloadname, None) if plain else None
    if overload is None or not schema.name.endswith("_"):
        return None
    new = editor.call(overload, node.args, node.kwargs, before=node)
    dtype = base.meta["val"].dtype
    if new.meta["val"].dtype != dtype:  # the result is written into the narrower operand
        new = editor.call(aten.to.dtype, (new, dtype), before=node)
    return new


def _is_read(view: Node, write: Node, order: Mapping[Node, int]) -> bool:
    """Whether a value that shares memory is used after the write."""
    return _may_alias(view) and any(
        order[user] > order[write] or _is_read(user, write, order) for user in view.users
    )


_SCATTERS = {"aten.slice": aten.slice_scatter.default, "aten.select": aten.select_scatter.default}


def _is_owned(node: Node) -> bool:
    """Whether no other value shares its memory: new, or the one view of what nothing else uses."""
    while _may_alias(node):
        source = node.args[0]
        if not isinstance(source, Node) or len(source.users) > 1:
            return False
        if node.target is operator.getitem and not _is_view(source):
            return False  # it hides what its results share
        node = source
    return node.op == "call_function"


def _later_users(base: Node, node: Node) -> list[Node]:
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    return [user for user in base.users if order[user] > order[node]]


def _is_view(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and any(
        r.alias_info is not None for r in target._schema.returns
    )


_MAY_RETURN_INPUT = ("aten.to", "aten.contiguous", "aten.reshape", "aten.dropout", "aten.type_as")


def _may_alias(node: Node) -> bool:
    """Whether a value may share memory with an operand (parts of a split do, through getitem)."""
    if node.target is operator.getitem:
        return not _makes_new(node.args[0])
    return _is_view(node) or (node.op == "call_function" and op_name(node) in _MAY_RETURN_INPUT)


def _makes_new(node: Node) -> bool:
    """Whether several results are new tensors; schemas of composed operations hide aliases."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and not _is_view(node)
        and not target.has_kernel_for_dispatch_key(_COMPOSED)
    )


_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd
