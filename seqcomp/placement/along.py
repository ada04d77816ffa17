"""Operations along the sharded sequence that need little of it: neighbours, totals, single tokens.

Each falls back to the gathered sequence where that is no more, or where its form does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch.fx import Node

from seqcomp.capture.edit import argument, is_tensor, op_name
from seqcomp.capture.sizes import Size, evaluate, product
from seqcomp.capture.windows import Window
from seqcomp.placement.dimwise import (
    along_rule,
    gather_rule,
    index_rule,
    index_select_rule,
    select_rule,
    slice_rule,
)
from seqcomp.placement.rule import Decision, Env, Rule, summed, tensor_args, unsharded
from seqcomp.placement.spec import Dim, Spec, is_uneven, whole


def token_axes(dim: Dim, env: Env) -> tuple[str, ...]:
    """The axes that deal out a dim of tokens, and nothing else, as the layout says."""
    if len(dim) != 1 or dim[0].size != env.capture.length or is_uneven(dim[0], env.mesh.degrees):
        return ()
    axes = dim[0].axes
    return axes if axes == env.mesh.sequence[: len(axes)] else ()


def in_runs(axes: Sequence[str], env: Env) -> bool:
    """Whether neighbouring tokens are on one rank, up to the ends of its runs."""
    return bool(axes) and env.mesh.striped not in axes


def window_rule(node: Node, env: Env) -> Decision:
    """What looks at neighbours: they travel where tokens stand in runs, else all tokens do."""
    x, window = node.args[0], node.target
    assert isinstance(window, Window)
    native = env.native[x]
    assert isinstance(native, Spec)
    spec = summed(env.spec(x))
    channels = [len(spec.dims) - 2] if window.mixes_channels else []
    wants = {n: Spec(tuple(whole(s) for s in env.shape(n))) for n in tensor_args(node)}
    want = unsharded(spec, channels)
    # Tokens that are whole stay so: what comes next may need them whole.
    shared = bool(native.axes_of(window.dim))
    want = env.inner_tokens(want) if shared else unsharded(want, [window.dim])
    axes = token_axes(want.dims[window.dim], env)
    # Padding stands behind the last token: those before it do not see it.
    hides = env.mesh.pads and (window.high > 0 or window.fill is None)
    fits = in_runs(axes, env) and not hides
    if not fits:
        want = unsharded(want, [window.dim])
    wants[x] = want
    out = want
    for index in channels:
        out = out.with_dim(index, whole(env.shape(node)[index]))
    if not fits:
        lost = set(native.axes_of(window.dim)) - set(want.axes_of(window.dim))
        reason = f"{window.written} mixes a sharded dim" if lost else ""
        return Decision(wants, out, gathered=reason)
    reach = max(-window.low, 0) + max(window.high, 0)
    attributes = {
        "axes": axes,
        "travels": f"{window.written}: each run of tokens gets at most {reach} neighbours over "
        f"{'+'.join(axes)}",
        # A rank's tokens are one run, or two in the zigzag layout.
        "bytes": min(
            2 * _bytes(x, product((reach, *_others(x, window.dim, env))), env),
            _bytes(x, product(env.shape(x)), env),
        ),
    }
    return Decision(wants, out, "window", attributes)


def cumsum_rule(node: Node, env: Env) -> Decision:
    """Running sums: each rank adds up its runs of tokens, and their totals travel."""
    x = node.args[0]
    dim = argument(node, 1, "dim") % max(len(env.shape(x)), 1)
    spec = summed(env.spec(x))
    axes = token_axes(spec.dims[dim], env) if spec.dims else ()
    if not in_runs(axes, env):
        return along_rule(node, env)
    size = product(_others(x, dim, env)) * 2 * (env.mesh.degree(axes) - 1)
    attributes = {
        "axes": axes,
        "dim": dim,
        "travels": f"{op_name(node)}: totals of the runs of tokens, over {'+'.join(axes)}",
        "bytes": _bytes(node, size, env),
    }
    return Decision({x: spec}, spec, "running_sum", attributes)


def token_rule(node: Node, env: Env) -> Decision | None:
    """One or a few tokens: their owners give them, all others zeros, and the sum is the token."""
    fallback, dim, index = _LOOKUPS[op_name(node)], _dim(node, env), _index(node)
    x = node.args[0]
    if dim is None:
        return fallback(node, env)
    spec = summed(env.spec(x))
    axes = token_axes(spec.dims[dim], env)
    count = _count(node, dim, env)
    if not axes or count is None or not _is_few(count, env) or not _starts_inside(node, count):
        return fallback(node, env)
    wants, lead, behind = {x: spec}, spec.dims[:dim], spec.dims[dim + 1 :]
    if index is None:
        middle = (whole(count),) if op_name(node) == "aten.slice" else ()
    elif op_name(node) == "rows_at":
        wants[index], middle = Spec((spec.dims[0],)), ()
    elif op_name(node) == "aten.gather":
        if _others(x, dim, env) != _others(index, dim, env):
            return fallback(node, env)
        wants[index] = spec.with_dim(dim, whole(env.shape(index)[dim]))
        middle = (whole(count),)
    else:
        wants[index] = summed(env.spec(index)).without(spec.axes)
        middle = wants[index].dims
    out = Spec((*lead, *middle, *behind), axes)
    degree = env.mesh.degree(axes)
    size = 2 * (degree - 1) * _bytes(x, product((*env.shape(node),)), env) // degree
    attributes = {
        "axes": axes,
        "dim": dim,
        "travels": f"{op_name(node)}: tokens of one rank are summed over {'+'.join(axes)}",
        "bytes": size,
    }
    return Decision(wants, out, "tokens", attributes)


def _dim(node: Node, env: Env) -> int | None:
    """The dim that is looked up."""
    name, ndim = op_name(node), len(env.shape(node.args[0]))
    if name == "rows_at":
        return 1
    if name == "aten.index":
        given = [i for i, index in enumerate(node.args[1]) if index is not None]
        return given[0] if len(given) == 1 else None
    dim = argument(node, 1, "dim", 0)
    return dim % ndim if isinstance(dim, int) and ndim else None


def _index(node: Node) -> Node | None:
    """The tensor of positions, where it is one."""
    if op_name(node) == "aten.index":
        return next((i for i in node.args[1] if i is not None), None)
    if op_name(node) == "rows_at":
        return node.args[1]
    found = argument(node, 2, "index")
    return found if is_tensor(found) else None


def _count(node: Node, dim: int, env: Env) -> Size | None:
    """How many tokens are taken of each row; None where it depends on the length."""
    index, name = _index(node), op_name(node)
    if name in ("rows_at", "aten.select"):
        return sympy.Integer(1)
    if name == "aten.gather":
        return env.shape(node)[dim]
    if index is not None:
        if index.meta["val"].dtype in _MASKS:
            return None
        return product(env.shape(index))
    return env.shape(node)[dim]


def _is_few(count: Size, env: Env) -> bool:
    """A sum costs twice what it sums; gathering costs the length."""
    length = env.capture.length
    if not count.is_Integer or length is None:
        return False
    return not length.is_Integer or 2 * int(count) < int(length)


def _starts_inside(node: Node, count: Size) -> bool:
    """Whether the positions of a slice are plain: counted from one end, and not cut off there."""
    if op_name(node) != "aten.slice":
        return True
    start, step = argument(node, 2, "start", 0), argument(node, 4, "step", 1)
    if not isinstance(start, int):
        return False
    return start >= 0 or -step <= start + step * (int(count) - 1) < 0


def _others(x: Node, dim: int, env: Env) -> tuple[Size, ...]:
    own = env.shape(x)
    return (*own[:dim], *own[dim + 1 :])


def _bytes(x: Node, elements: Size, env: Env) -> int:
    size: int = x.meta["val"].element_size()
    return size * evaluate(sympy.sympify(elements), env.capture.hints)


_MASKS = (torch.bool, torch.uint8)
_LOOKUPS: dict[str, Rule] = {
    "aten.select": select_rule,
    "aten.slice": slice_rule,
    "aten.gather": gather_rule,
    "aten.index": index_rule,
    "aten.index_select": index_select_rule,
    "rows_at": lambda node, env: None,
}
ALONG_RULES: dict[str, Rule] = {
    "window": window_rule,
    "aten.cumsum": cumsum_rule,
    **dict.fromkeys(_LOOKUPS, token_rule),
}
