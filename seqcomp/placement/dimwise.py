"""Operations that mix values along certain dims and leave the others alone.

Mixed dims must be whole; all others keep their placement. Sums and means over a sharded dim are
the exception: they give partial sums instead of a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from seqcomp.capture.edit import argument, is_tensor, op_name
from seqcomp.placement.pointwise import pointwise_rule
from seqcomp.placement.rule import (
    Decision,
    Env,
    Rule,
    align,
    outputs_of,
    summed,
    tensor_args,
    unsharded,
)
from seqcomp.placement.spec import Dim, Factor, Spec, merged, whole


def _dims(value: Any, ndim: int) -> list[int]:
    if value is None or value == []:
        return list(range(ndim))
    listed = value if isinstance(value, list | tuple) else [value]
    return [d % ndim for d in listed] if ndim else []


def _mixing(node: Node, env: Env, dims: Sequence[int]) -> tuple[Node, Spec, str]:
    source = node.args[0]
    spec = env.spec(source)
    want = unsharded(spec, dims)
    lost = set(spec.axes) - set(want.axes)
    return source, want, f"{op_name(node)} mixes a sharded dim" if lost else ""


def along_rule(node: Node, env: Env) -> Decision:
    """softmax, cumsum, sort, roll, flip, ...: same shape, some dims mixed."""
    ndim = len(env.shape(node.args[0]))
    name = op_name(node)
    position, default = _ALONG[name]
    value = argument(node, position, "dims" if name in ("aten.flip", "aten.roll") else "dim",
                     default)  # fmt: skip
    _, want, reason = _mixing(node, env, _dims(value, ndim))
    wants = {n: _fit(want, env.shape(n)) for n in tensor_args(node)}  # diff may prepend others
    if is_tensor(node):
        out: Spec | tuple[Spec, ...] = _fit(want, env.shape(node))
    else:
        out = tuple(_fit(want, shape) for shape in outputs_of(node, env))
    return Decision(wants, out, gathered=reason)


def _fit(spec: Spec, shape: Sequence[Any]) -> Spec:
    """The spec for a result whose mixed dims may have another size."""
    dims = tuple(
        dim if spec.size(i) == shape[i] else whole(shape[i]) for i, dim in enumerate(spec.dims)
    )
    return Spec(dims)


# operation -> (position of its dim argument, default)
_ALONG: dict[str, tuple[int, Any]] = {
    "aten.softmax": (1, -1), "aten._softmax": (1, -1), "aten.log_softmax": (1, -1),
    "aten._log_softmax": (1, -1), "aten.cumsum": (1, 0), "aten.cumprod": (1, 0),
    "aten.logcumsumexp": (1, 0), "aten.sort": (1, -1), "aten.argsort": (1, -1),
    "aten.topk": (2, -1), "aten.flip": (1, None), "aten.roll": (2, None), "aten.diff": (2, -1),
    "aten.glu": (1, -1), "aten.cummax": (1, 0), "aten.cummin": (1, 0),
    "aten.tril": (9, [-2, -1]), "aten.triu": (9, [-2, -1]),
}  # fmt: skip


def reduce_rule(node: Node, env: Env) -> Decision:
    """Reductions over dims. Only sum and mean may leave partial sums over the axes they reduce."""
    name = op_name(node)
    source = node.args[0]
    if len(node.args) > 1 and is_tensor(node.args[1]):
        return pointwise_rule(node, env)  # max(a, b) and min(a, b)
    ndim = len(env.shape(source))
    given = argument(node, 1, "dim")
    named = given is not None and given != []
    dims = _dims(given if named else None, ndim)
    keep = bool(argument(node, 2, "keepdim", False))
    spec = env.spec(source)
    additive = name in ("aten.sum", "aten.mean") and len(node.users) > 0
    if additive:
        want, reason = summed(spec), ""
    else:
        source, want, reason = _mixing(node, env, dims)
    partial = tuple(a for d in dims for a in want.axes_of(d))
    kept: list[Dim] = []
    for i, dim in enumerate(want.dims):
        if i not in dims:
            kept.append(dim)
        elif keep:
            kept.append(())
    form = "mean" if name == "aten.mean" and partial else "local"
    attributes = {"degree": env.mesh.degree(partial)} if form == "mean" else {}
    if is_tensor(node):
        out: Spec | tuple[Spec, ...] = Spec(tuple(kept), partial)
    else:
        out = tuple(Spec(tuple(kept)) for _ in outputs_of(node, env))
    return Decision({source: want}, out, form, attributes, gathered=reason)


def norm_rule(node: Node, env: Env) -> Decision:
    """layer_norm and rms_norm over trailing dims; weight and bias are whole."""
    source = node.args[0]
    ndim, count = len(env.shape(source)), len(node.args[1])
    _, want, reason = _mixing(node, env, range(ndim - count, ndim))
    wants = {source: want}
    for other in tensor_args(node):
        if other is not source:
            wants[other] = Spec(tuple(whole(s) for s in env.shape(other)))
    return Decision(wants, want, gathered=reason)


def slice_rule(node: Node, env: Env) -> Decision:
    source = node.args[0]
    dim = argument(node, 1, "dim", 0) % len(env.shape(source))
    _, want, reason = _mixing(node, env, [dim])
    return Decision({source: want}, _fit(want, env.shape(node)), gathered=reason)


def select_rule(node: Node, env: Env) -> Decision:
    source = node.args[0]
    dim = node.args[1] % len(env.shape(source))
    _, want, reason = _mixing(node, env, [dim])
    out = replace(want, dims=(*want.dims[:dim], *want.dims[dim + 1 :]))
    return Decision({source: want}, out, gathered=reason)


def split_rule(node: Node, env: Env) -> Decision:
    """split, chunk, unbind, ...: several results along one dim."""
    name, source = op_name(node), node.args[0]
    position = 1 if name == "aten.unbind" else 2
    dim = argument(node, position, "dim", 0) % len(env.shape(source))
    _, want, reason = _mixing(node, env, [dim])
    outs = []
    for shape in outputs_of(node, env):
        if name == "aten.unbind":
            outs.append(replace(want, dims=(*want.dims[:dim], *want.dims[dim + 1 :])))
        else:
            outs.append(want.with_dim(dim, whole(shape[dim])))
    return Decision({source: want}, tuple(outs), gathered=reason)


def cat_rule(node: Node, env: Env) -> Decision | None:
    """cat and stack: the others agree; the joined dim is whole, or of parts that are cut alike."""
    name, operands = op_name(node), list(node.args[0])
    ndim = len(env.shape(node))
    dim = argument(node, 1, "dim", 0) % ndim
    if name == "aten.stack":
        shape = (*env.shape(node)[:dim], *env.shape(node)[dim + 1 :])
        wants, dims = align(list(dict.fromkeys(operands)), shape, env)
        wants = {n: summed(s) for n, s in wants.items()}
        out = (*dims[:dim], whole(env.shape(node)[dim]), *dims[dim:])
        return Decision(wants, Spec(out))
    if any(len(env.shape(n)) != ndim for n in operands):
        return None
    shape = env.shape(node)
    wants, dims = align(list(dict.fromkeys(operands)), shape, env)
    parts = _parts_alike(operands, dim, dims, env)
    if parts:  # ranks join their own parts, one after the other
        joined = {n: summed(s).with_dim(dim, parts) for n, s in wants.items()}
        count = Factor(sympy.Integer(len(operands)))
        return Decision(joined, Spec((*dims[:dim], merged((count, *parts)), *dims[dim + 1 :])))
    # align leaves dims of other sizes whole, which the joined dim always is.
    joined = {n: unsharded(s, [dim]) for n, s in wants.items()}
    gave_up = any(env.spec(n).axes_of(dim) for n in operands)
    out_dims = (*dims[:dim], whole(shape[dim]), *dims[dim + 1 :])
    reason = "parts are joined along a sharded dim" if gave_up else ""
    return Decision(joined, Spec(out_dims), gathered=reason)


def _parts_alike(operands: Sequence[Node], dim: int, dims: Sequence[Dim], env: Env) -> Dim:
    """How operands of one size are cut along the dim that joins them; () where they are not."""
    used = {a for i, d in enumerate(dims) if i != dim for f in d for a in f.axes}
    cuts = [env.spec(n).dims[dim] for n in operands]
    lead = max(cuts, key=lambda d: sum(len(f.axes) for f in d))
    axes = {a for f in lead for a in f.axes}
    sizes = {env.shape(n)[dim] for n in operands}
    alike = len(sizes) == 1 and axes and not axes & used and not env.mesh.is_uneven(lead)
    return lead if alike else ()


def pad_rule(node: Node, env: Env) -> Decision:
    source, pads = node.args[0], list(node.args[1])
    ndim = len(env.shape(source))
    touched = {ndim - 1 - i // 2 for i, p in enumerate(pads) if not (isinstance(p, int) and p == 0)}
    _, want, reason = _mixing(node, env, sorted(touched))
    return Decision({source: want}, _fit(want, env.shape(node)), gathered=reason)


def gather_rule(node: Node, env: Env) -> Decision | None:
    """gather, scatter, take_along_dim: one dim is indexed, the others go together."""
    name, source = op_name(node), node.args[0]
    if not isinstance(argument(node, 1, "dim"), int):
        return None
    index = argument(node, 2, "index")
    dim = argument(node, 1, "dim") % len(env.shape(source))
    operands = [n for n in tensor_args(node) if n not in (source, index)]
    others = [s for i, s in enumerate(env.shape(source)) if i != dim]
    for operand in (index, *operands):
        own = env.shape(operand)
        if len(own) != len(env.shape(source)) or others != [
            s for i, s in enumerate(own) if i != dim
        ]:
            return None
    spec, at = env.spec(source), env.spec(index)
    lead = spec if len(spec.axes) >= len(at.axes) else at
    reason = f"{name} indexes a sharded dim" if lead.axes_of(dim) else ""
    lead = unsharded(lead, [dim])
    wants = {n: lead.with_dim(dim, whole(env.shape(n)[dim])) for n in (source, index, *operands)}
    out = lead.with_dim(dim, whole(env.shape(node)[dim]))
    return Decision(wants, out, gathered=reason)


def index_rule(node: Node, env: Env) -> Decision | None:
    """x[i] with one index tensor: its dims take the place of the indexed one."""
    source, indices = node.args[0], list(node.args[1])
    given = [i for i, index in enumerate(indices) if index is not None]
    if len(given) != 1 or indices[given[0]].meta["val"].dtype == torch.bool:
        return None
    return _lookup(node, env, source, given[0], indices[given[0]])


def index_select_rule(node: Node, env: Env) -> Decision:
    source, dim, index = node.args[:3]
    return _lookup(node, env, source, dim % len(env.shape(source)), index)


def _lookup(node: Node, env: Env, source: Node, dim: int, index: Node) -> Decision:
    spec = unsharded(env.spec(source), [dim])
    at = summed(env.spec(index)).without(spec.axes)
    out = Spec((*spec.dims[:dim], *at.dims, *spec.dims[dim + 1 :]))
    gave_up = set(env.spec(source).axes) - set(spec.axes)
    reason = "a sharded dim is indexed" if gave_up else ""
    return Decision({source: spec, index: at}, out, gathered=reason)


def one_hot_rule(node: Node, env: Env) -> Decision:
    source = node.args[0]
    spec = summed(env.spec(source))
    return Decision({source: spec}, Spec((*spec.dims, whole(env.shape(node)[-1]))))


def create_rule(node: Node, env: Env) -> Decision:
    """New tensors of global size, the same on every rank; an operand only lends its dtype."""
    wants = {n: env.spec(n) for n in tensor_args(node)}
    return Decision(wants, Spec(tuple(whole(s) for s in env.shape(node))), form="create")


def _rules() -> dict[str, Rule]:
    table: dict[str, Rule] = dict.fromkeys(_ALONG, along_rule)
    for name in ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all",
                 "logsumexp", "var", "std", "prod", "linalg_vector_norm", "norm", "var_mean",
                 "nansum", "count_nonzero", "median"):  # fmt: skip
        table[f"aten.{name}"] = reduce_rule
    for name in ("arange", "full", "zeros", "ones", "eye", "linspace", "empty", "new_ones",
                 "new_zeros", "new_full", "new_empty", "scalar_tensor", "tril_indices",
                 "triu_indices"):  # fmt: skip
        table[f"aten.{name}"] = create_rule
    for name in ("split", "chunk", "unbind", "split_with_sizes", "tensor_split", "unsafe_split",
                 "unsafe_chunk"):  # fmt: skip
        table[f"aten.{name}"] = split_rule
    for name in ("gather", "scatter", "scatter_add", "scatter_reduce"):
        table[f"aten.{name}"] = gather_rule
    table |= dict.fromkeys(("aten.layer_norm", "aten.rms_norm", "aten._fused_rms_norm"), norm_rule)
    table |= {
        "aten.slice": slice_rule,
        "aten.narrow": slice_rule,
        "aten.select": select_rule,
        "aten.cat": cat_rule,
        "aten.concat": cat_rule,
        "aten.stack": cat_rule,
        "aten.pad": pad_rule,
        "aten.constant_pad_nd": pad_rule,
        "aten.index": index_rule,
        "aten.index_select": index_select_rule,
        "aten.one_hot": one_hot_rule,
    }
    return table


DIMWISE_RULES = _rules()
