"""Where the features of a value come from and go to: walks over a captured graph."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Node

from seqcomp.capture.edit import argument, is_tensor, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.kinds import VIEWS, is_pointwise
from seqcomp.capture.sizes import Size

SPLITS = ("aten.split", "aten.chunk", "aten.split_with_sizes", "aten.tensor_split",
          "aten.unsafe_split", "aten.unsafe_chunk", "aten.unsafe_split_with_sizes")  # fmt: skip


_WITHIN_HEADS = ("aten.slice", "aten.select", "aten.index", "aten.rms_norm", "aten.layer_norm",
                 "aten.mean")  # fmt: skip


def is_linear(node: Node, capture: Capture) -> bool:
    """A linear whose weight is a parameter, or a slice or the transpose of one."""
    if node.op != "call_function" or op_name(node) != "aten.linear":
        return False
    weight = node.args[1]
    while isinstance(weight, Node) and op_name(weight) in ("aten.t", "aten.slice"):
        weight = weight.args[0]
    return isinstance(weight, Node) and weight.name in capture.parameters


def width(linear: Node) -> int:
    """Features that a linear makes."""
    return int(linear.meta["val"].shape[-1])


# What models make themselves where a call leaves it out: all calls must agree on the cut.
_LEFT_OUT = ("token_type_ids", "position_ids", "positions", "segment_ids")


def from_words(node: Any, capture: Capture) -> bool:
    """Whether a value is made of an input of tokens, moved and changed one by one."""
    if not is_tensor(node):
        return False
    if node.op != "call_function":
        where = capture.inputs.index(node.name) if node.name in capture.inputs else None
        dims = capture.dims[where] if where is not None else None
        return where is not None and (dims is None or dims.name not in _LEFT_OUT)
    name = op_name(node)
    if name.endswith("_like") or name.startswith("aten.new_") or not node.args:
        return False  # the operand gives sizes alone
    if node.meta["val"].dtype == torch.bool:
        return False  # positions counted from which tokens are padding are no tokens
    parts = 2 if name in ("aten.slice_scatter", "aten.select_scatter") else 1
    first = 1 if name == "aten.where" else 0
    return any(from_words(part, capture) for part in node.args[first : 2 * first + parts])


def sources(
    node: Node, capture: Capture, heads: int = 0, shared: dict[Node, int] | None = None
) -> set[Node] | None:
    """The linears that `node` is made of, token by token and feature group by feature group.

    None where something in between mixes features or comes from elsewhere. Of what all `heads`
    share (the rotary part of latent attention's keys) the expansion over them is put into
    `shared`, with their dim, and not followed.
    """
    found: set[Node] = set()
    seen: set[Node] = set()
    work = [node]
    while work:
        item = work.pop()
        if item in seen:
            continue
        seen.add(item)
        if is_linear(item, capture):
            found.add(item)
            continue
        if shared is not None and (dim := _expanded(item, heads, capture)) is not None:
            shared[item] = dim
            continue
        operands = _passes_through(item, capture)
        if operands is None:
            return None
        work.extend(operands)
    return found


def _passes_through(node: Node, capture: Capture) -> list[Node] | None:
    """Operands whose features `node` keeps apart; None when it does not keep them apart."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    name = op_name(node)
    if name == "attention":
        return None
    if node.target is operator.getitem:
        node = node.args[0]
        name = op_name(node)
        per_head = name in (*SPLITS, "aten.unbind") and _is_per_head(node.args[0])
        return [node.args[0]] if per_head else None
    if name in VIEWS:
        return [node.args[0]]
    if name in _WITHIN_HEADS:
        # Behind the view into heads: per head, or along head_dim (rotary halves).
        return [node.args[0]] if _is_per_head(node.args[0]) else None
    if name == "aten.cat":
        return list(node.args[0]) if _is_per_head(node) else None
    if is_pointwise(node):
        return [n for n in node.all_input_nodes if is_tensor(n) and _carries(n, capture)]
    return None


def _expanded(node: Node, heads: int, capture: Capture) -> int | None:
    """The one dim that is 1 before this expansion and `heads` behind it."""
    if op_name(node) not in ("aten.expand", "aten.expand_as", "aten.broadcast_to"):
        return None
    own, shape = capture.shape(node.args[0]), capture.shape(node)
    grown = [i for i, (a, b) in enumerate(zip(own, shape, strict=False)) if a != b]
    alone = len(own) == len(shape) and len(grown) == 1 and shape[grown[0]] == heads
    return grown[0] if alone else None


def _carries(node: Node, capture: Capture) -> bool:
    """Whether a value carries features of a token (position tables, weights and scalars do not)."""
    work, seen = [node], {node}
    while work:
        item = work.pop()
        if is_linear(item, capture) or op_name(item) in ("attention", "aten.embedding"):
            return True
        value = item.meta["val"]
        given = item.op == "placeholder" and item.name in capture.inputs
        if given and value.is_floating_point() and value.ndim >= 3:
            return True
        for operand in item.all_input_nodes:
            if is_tensor(operand) and operand not in seen:
                seen.add(operand)
                work.append(operand)
    return False


def _is_per_head(node: Node) -> bool:
    return node.meta["val"].ndim >= 4


def by_heads(linear: Node, heads: int, capture: Capture, degree: int) -> bool:
    """Whether a cut of rows cuts heads: the features are viewed as [heads, ...], or as groups of
    heads that `degree` divides."""
    lead = capture.shape(linear)[:-1]
    counts = {
        _first_behind(lead, capture.shape(user)) if op_name(user) in VIEWS else None
        for user in linear.users
    }
    count = counts.pop() if len(counts) == 1 else None
    if count is None or not count.is_Integer:
        return False
    return count == heads or (heads % int(count) == 0 and int(count) % degree == 0)


def _first_behind(lead: Sequence[Size], shape: Sequence[Size]) -> Size | None:
    """The size behind the tokens `lead` of a view, which may drop and add dims of 1 among them."""
    rest = list(shape)
    for size in lead:
        if size == 1:
            continue
        while rest and rest[0] == 1:
            rest.pop(0)
        if not rest or rest.pop(0) != size:
            return None
    return rest[0] if rest else None


def feeds(node: Node, targets: Collection[Node]) -> bool:
    """Whether an attention, or one of `targets`, is computed from the value of `node`."""
    work, seen = [node], {node}
    while work:
        for user in work.pop().users:
            if op_name(user) == "attention" or user in targets:
                return True
            if user not in seen:
                seen.add(user)
                work.append(user)
    return False


def next_linears(node: Node, capture: Capture) -> set[Node] | None:
    """The linears that the value of `node` reaches through views and element-wise operations.

    None where it reaches anything else.
    """
    found: set[Node] = set()
    work, seen = [node], {node}
    while work:
        for user in work.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if is_linear(user, capture):
                found.add(user)
            elif op_name(user) in VIEWS or is_pointwise(user):
                work.append(user)
            else:
                return None
    return found


def ends_in(source: Node, targets: set[Node]) -> bool:
    """Every path from `source` reaches a target before anything that mixes features."""
    work, seen = [source], {source}
    while work:
        for user in work.pop().users:
            if user in targets or user in seen:
                continue
            seen.add(user)
            if user.op == "output" or not (op_name(user) in VIEWS or is_pointwise(user)):
                return False
            work.append(user)
    return True


def parts_of_dim(node: Node, dim: int, capture: Capture) -> list[tuple[Node, int, int]] | None:
    """(part, start, end) where parts along `dim` that keep it are all that uses `node`."""
    ndim, total = node.meta["val"].ndim, int(node.meta["val"].shape[dim])
    found: list[tuple[Node, int, int]] = []
    for user in node.users:
        name = op_name(user)
        if name == "aten.slice":
            start, end = argument(user, 2, "start", 0), argument(user, 3, "end", total)
            plain = isinstance(start, int) and isinstance(end, int)
            if user.args[1] % ndim != dim or not plain or argument(user, 4, "step", 1) != 1:
                return None
            start, end = (n + total if n < 0 else min(n, total) for n in (start, end))
            found.append((user, start, end))
        elif name in SPLITS and argument(user, 2, "dim", 0) % ndim == dim:
            ends = [0]
            for part in user.meta["val"]:
                ends.append(ends[-1] + int(part.shape[dim]))
            for item in user.users:
                assert item.target is operator.getitem
                at = item.args[1] % (len(ends) - 1)
                found.append((item, ends[at], ends[at + 1]))
        elif name == "aten.index" and (run := _run_of(user, dim, total, capture)) is not None:
            found.append((user, *run))
        else:
            return None
    return found


def _run_of(index: Node, dim: int, total: int, capture: Capture) -> tuple[int, int] | None:
    """start and end where x[..., [i, i + 1, ...], ...] takes neighbours along `dim` alone."""
    given = [(i, at) for i, at in enumerate(index.args[1]) if at is not None]
    if len(given) != 1 or given[0][0] != dim:
        return None
    known = capture.constants.get(capture.state.get(given[0][1].name, ""))
    if known is None or known.ndim != 1 or known.dtype == torch.bool or not len(known):
        return None
    first = int(known[0]) % total
    run = [int(i) % total for i in known]
    return (first, first + len(run)) if run == list(range(first, first + len(run))) else None
