"""Operations that rearrange dims without touching values."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch
from torch.fx import Node

from seqcomp.capture.edit import TRANSPOSITIONS, argument, transposed_dims
from seqcomp.placement.rule import Decision, Env, Rule, gather_all, summed, tensor_args
from seqcomp.placement.spec import Dim, Factor, Spec, merged, regroup, whole


def reshape_rule(node: Node, env: Env) -> Decision:
    """view, reshape, flatten, unflatten: factors move between dims; a torn one is gathered."""
    source = node.args[0]
    if len(node.args) > 1 and isinstance(node.args[1], torch.dtype):
        return gather_all(node, env, "values are seen as another dtype")
    spec, reason = env.spec(source), ""
    while True:
        dims = regroup(spec.dims, env.shape(node), env.even_degrees())
        if not isinstance(dims, Factor):
            wants = {source: spec, **_shape_givers(node, Spec(dims))}
            return Decision(wants, Spec(dims, spec.partial), gathered=reason)
        if not spec.axes:  # sizes such as S // 2 that no factor divides
            out = Spec(tuple(whole(size) for size in env.shape(node)))
            wants = {source: spec, **_shape_givers(node, out)}
            return Decision(wants, replace(out, partial=spec.partial), gathered=reason)
        reason = f"the view cuts the dim of size {dims.size}"
        spec = spec.without(dims.axes or spec.axes)


def transpose_rule(node: Node, env: Env) -> Decision:
    source, order = node.args[0], transposed_dims(node)
    assert order is not None
    spec = env.spec(source)
    return Decision({source: spec}, Spec(tuple(spec.dims[i] for i in order), spec.partial))


def unsqueeze_rule(node: Node, env: Env) -> Decision:
    source, dim = node.args[0], node.args[1] % len(env.shape(node))
    spec = env.spec(source)
    dims = (*spec.dims[:dim], (), *spec.dims[dim:])
    return Decision({source: spec}, Spec(dims, spec.partial))


def squeeze_rule(node: Node, env: Env) -> Decision:
    source = node.args[0]
    spec, shape = env.spec(source), env.shape(source)
    dims = argument(node, 1, "dim")
    if dims is None:
        candidates = set(range(len(shape)))
    else:
        listed = dims if isinstance(dims, list | tuple) else [dims]
        candidates = {d % len(shape) for d in listed}
    gone = {d for d in candidates if shape[d] == 1}
    kept = tuple(dim for i, dim in enumerate(spec.dims) if i not in gone)
    return Decision({source: spec}, Spec(kept, spec.partial))


def expand_rule(node: Node, env: Env) -> Decision:
    source = node.args[0]
    spec, shape = env.spec(source), env.shape(node)
    missing = len(shape) - len(spec.dims)
    own = env.shape(source)
    dims: list[Dim] = []
    for i, size in enumerate(shape):
        at = i - missing
        dims.append(spec.dims[at] if at >= 0 and own[at] == size else whole(size))
    heads, axis = env.shared_heads(node), env.mesh.tensor
    if heads is not None and axis is not None:  # each rank over its own heads, of all tokens
        spec = summed(spec.without([axis]))
        dims = list(Spec(tuple(dims)).without([axis]).dims)
        dims[heads] = (Factor(shape[heads], (axis,)),)
    wants = {source: spec, **_shape_givers(node, Spec(tuple(dims)))}
    return Decision(wants, Spec(tuple(dims), spec.partial))


def _shape_givers(node: Node, out: Spec) -> dict[Node, Spec]:
    """Operands of view_as, expand_as, ...: their local shape is the local shape of the result."""
    return {n: out for n in tensor_args(node) if n is not node.args[0]}


def repeat_rule(node: Node, env: Env) -> Decision:
    """repeat and tile: copies of all of a dim follow each other, (copies, dim)."""
    source, repeats = node.args[0], list(node.args[1])
    want, shape = env.spec(source), env.shape(node)
    missing = len(shape) - len(want.dims)
    repeats = [1] * (len(shape) - len(repeats)) + repeats
    dims: list[Dim] = [whole(size) for size in shape[:missing]]
    reason = ""
    for i, times in enumerate(repeats[missing:]):
        copied = times != 1
        if copied and not _can_copy(times, want.dims[i], env):
            want, reason = want.without(want.axes_of(i)), "a sharded dim is repeated"
        if copied and not want.axes_of(i):
            dims.append(whole(shape[missing + i]))
        else:
            copies = (Factor(sympy.Integer(times)),) if copied else ()
            dims.append(merged((*copies, *want.dims[i])))
    return Decision({source: want}, Spec(tuple(dims), want.partial), gathered=reason)


def repeat_interleave_rule(node: Node, env: Env) -> Decision | None:
    """The copies of each element follow it, (dim, copies): they stay with their token."""
    source, times = node.args[:2]
    ndim = len(env.shape(source))
    dim = argument(node, 2, "dim", 0 if ndim == 1 else None)
    if not isinstance(times, int) or dim is None:
        return None
    want, dim = env.spec(source), dim % ndim
    size, reason = env.shape(node)[dim], ""
    sized = argument(node, 3, "output_size") is not None
    if want.axes_of(dim) and (sized or not _can_copy(times, want.dims[dim], env)):
        want, reason = want.without(want.axes_of(dim)), "a sharded dim is repeated"
    copies: Dim = (*want.dims[dim], Factor(sympy.Integer(times)))
    out = want.with_dim(dim, merged(copies) if want.axes_of(dim) else whole(size))
    return Decision({source: want}, out, gathered=reason)


def _can_copy(times: object, dim: Dim, env: Env) -> bool:
    """Whether ranks may copy their own parts: a known number of times, of parts of equal size."""
    return isinstance(times, int) and times > 0 and not env.mesh.is_uneven(dim)


def view_as_complex_rule(node: Node, env: Env) -> Decision:
    source = node.args[0]
    spec = env.spec(source)
    want = spec.without(spec.axes_of(len(spec.dims) - 1))
    return Decision({source: want}, replace(want, dims=want.dims[:-1]))


def view_as_real_rule(node: Node, env: Env) -> Decision:
    source = node.args[0]
    spec = env.spec(source)
    return Decision({source: spec}, replace(spec, dims=(*spec.dims, whole(sympy.Integer(2)))))


def _rules() -> dict[str, Rule]:
    table: dict[str, Rule] = {}
    for name in ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as",
                 "reshape_as", "_reshape_alias"):  # fmt: skip
        table[f"aten.{name}"] = reshape_rule
    table |= dict.fromkeys(TRANSPOSITIONS, transpose_rule)
    for name in ("expand", "expand_as", "broadcast_to"):
        table[f"aten.{name}"] = expand_rule
    table |= {
        "aten.unsqueeze": unsqueeze_rule,
        "aten.squeeze": squeeze_rule,
        "aten.repeat": repeat_rule,
        "aten.tile": repeat_rule,
        "aten.repeat_interleave": repeat_interleave_rule,
        "aten.view_as_complex": view_as_complex_rule,
        "aten.view_as_real": view_as_real_rule,
    }
    return table


VIEW_RULES = _rules()
