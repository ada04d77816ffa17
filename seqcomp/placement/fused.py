"""Linears that make several things at once, taken apart into one linear for each.

A fused [q | k | v] or [gate | up] weight has no contiguous shard that is a shard of every part.
As linears on slices of the weight the parts are column-parallel each, and the weight stays whole
where it lives. The rewrite holds in the global view: it changes no value.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor, argument, is_tensor, op_name, transposed_dims
from seqcomp.capture.export import Capture
from seqcomp.placement.features import is_linear, parts_of_dim, width

aten = torch.ops.aten

_RESHAPES = ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.unflatten")


def separate_fused(capture: Capture) -> None:
    """Rewrites every linear whose result is used part by part."""
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        if not is_linear(node, capture):
            continue
        lifts = _lifts(node)
        held = lifts[-1] if lifts else node
        parts = parts_of_dim(held, held.meta["val"].ndim - 1, capture)
        if parts is not None and _disjoint([(start, end) for _, start, end in parts]):
            for part, start, end in parts:
                value = _part(editor, node, start, end)
                for lift in lifts:
                    value = editor.call(lift.target, (value, *lift.args[1:]), before=part)
                editor.replace(part, value)
        elif (stack := _stacked(capture, node)) is not None:
            _unstack(editor, node, stack)
        elif (heads := _groups_of_heads(capture, node)) is not None:
            _ungroup(editor, node, heads)
    capture.graph.eliminate_dead_code()


def _lifts(linear: Node) -> list[Node]:
    """The new dims of 1 before its features that a result is given first of all."""
    found: list[Node] = []
    held = linear
    while len(held.users) == 1:
        (user,) = held.users
        ndim = user.meta["val"].ndim if is_tensor(user) else 0
        if op_name(user) != "aten.unsqueeze" or user.args[1] % ndim == ndim - 1:
            break
        found.append(user)
        held = user
    return found


def _disjoint(ranges: list[tuple[int, int]]) -> bool:
    """Several parts that share nothing; the same part twice would be computed twice."""
    ordered = sorted(ranges)
    apart = all(a[1] <= b[0] for a, b in itertools.pairwise(ordered))
    return len(ranges) > 1 and apart and all(start < end for start, end in ranges)


def _part(editor: Editor, linear: Node, start: int, end: int) -> Node:
    """The linear of features start..end alone."""
    x, weight = linear.args[:2]
    bias = argument(linear, 2, "bias")
    if op_name(weight) == "aten.t":  # the slice is taken where the weight lives
        rows = editor.call(aten.slice.Tensor, (weight.args[0], 1, start, end), before=linear)
        rows = editor.call(aten.t.default, (rows,), before=linear)
    else:
        rows = editor.call(aten.slice.Tensor, (weight, 0, start, end), before=linear)
    args = [x, rows]
    if is_tensor(bias):
        args.append(editor.call(aten.slice.Tensor, (bias, 0, start, end), before=linear))
    return editor.call(aten.linear.default, args, before=linear)


@dataclass(frozen=True)
class _Stack:
    """A result viewed as [..., n, rest] whose n parts are taken one by one.

    chain: the view and what moves its dims, in order; picks: (user, part) of the end of the chain,
    where the parts lie along `dim`.
    """

    count: int
    chain: tuple[Node, ...]
    picks: tuple[tuple[Node, int], ...]
    dim: int


def _groups_of_heads(capture: Capture, linear: Node) -> list[tuple[Node, int, int]] | None:
    """(part, start, end) where a result is viewed as [..., heads, d] and used by disjoint heads.

    One KV head behind the query heads (multi-query attention).
    """
    (view, *more) = linear.users or [None]
    lead = capture.shape(linear)[:-1]
    if more or view is None or op_name(view) not in _RESHAPES:
        return None
    at, shape = len(lead), capture.shape(view)
    if shape[:at] != lead or len(shape) != at + 2 or not shape[at].is_Integer:
        return None
    parts = parts_of_dim(view, at, capture)
    if parts is None or not _disjoint([(start, end) for _, start, end in parts]):
        return None
    return parts


def _ungroup(editor: Editor, linear: Node, parts: list[tuple[Node, int, int]]) -> None:
    for part, start, end in parts:
        dim = int(part.meta["val"].shape[-1])
        value = _part(editor, linear, start * dim, end * dim)
        lead = value.meta["val"].ndim - 1
        args = (value, lead, [end - start, dim])
        editor.replace(part, editor.call(aten.unflatten.int, args, before=part))


def _stacked(capture: Capture, linear: Node) -> _Stack | None:
    (view, *more) = linear.users or [None]
    if more or view is None or op_name(view) not in _RESHAPES:
        return None
    lead, shape = capture.shape(linear)[:-1], capture.shape(view)
    at = len(lead)
    if shape[:at] != lead or len(shape) < at + 2 or not shape[at].is_Integer:
        return None
    chain, count = [view], int(shape[at])
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        if (moved := _moved(user, at, len(capture.shape(chain[-1])))) is None:
            break
        chain.append(user)
        at = moved
    picks = _picks(chain[-1], at)
    if picks is None or sorted(i for _, i in picks) != list(range(count)):
        return None
    return _Stack(count, tuple(chain), tuple(picks), at)


def _moved(node: Node, at: int, ndim: int) -> int | None:
    """Where dim `at` of the operand is in the result; None for what does more than move dims."""
    name = op_name(node)
    if name in ("aten.contiguous", "aten.clone"):
        return at
    order = transposed_dims(node)
    if order is not None:
        return order.index(at)
    if name == "aten.unsqueeze":
        return at + (node.args[1] % (ndim + 1) <= at)
    if name == "aten.squeeze" and isinstance(node.args[1], list | tuple):
        gone = [d % ndim for d in node.args[1]]
        return None if at in gone else at - sum(d < at for d in gone)
    return None


def _picks(node: Node, at: int) -> list[tuple[Node, int]] | None:
    """(value, part) where every use of `node` takes one part along dim `at`."""
    ndim, found = node.meta["val"].ndim, []
    count = int(node.meta["val"].shape[at])
    for user in node.users:
        name = op_name(user)
        if name == "aten.select" and user.args[1] % ndim == at and isinstance(user.args[2], int):
            found.append((user, user.args[2] % count))
        elif name == "aten.unbind" and argument(user, 1, "dim", 0) % ndim == at:
            for item in user.users:
                assert item.target is operator.getitem
                found.append((item, item.args[1] % count))
        else:
            return None
    return found


def _unstack(editor: Editor, linear: Node, stack: _Stack) -> None:
    """The chain is run again for each part, as a stack of one."""
    view, *rest = stack.chain
    step = width(linear) // stack.count
    for pick, index in stack.picks:
        value = _part(editor, linear, index * step, (index + 1) * step)
        lead = value.meta["val"].ndim - 1
        tail = [1, *view.meta["val"].shape[lead + 1 :]]
        value = editor.call(aten.unflatten.int, (value, lead, tail), before=pick, like=view)
        for node in rest:
            value = editor.call(node.target, (value, *node.args[1:]), node.kwargs, before=pick,
                                like=node)  # fmt: skip
        editor.replace(pick, editor.call(aten.select.int, (value, stack.dim, 0), before=pick))
