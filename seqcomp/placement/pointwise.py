"""Element-wise operations: each output element needs the same element of every operand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from seqcomp.capture.edit import op_name
from seqcomp.capture.sizes import Size, SpecialisedSizeError
from seqcomp.placement.rule import Decision, Env, align, summed, tensor_args
from seqcomp.placement.spec import Spec

# f(sum of parts) == sum of f(part)
_LINEAR = {"aten.neg", "aten.clone", "aten.contiguous", "aten.alias", "aten.to", "aten.positive"}
# The second operand, of any shape, only lends its dtype.
_CASTS = {"aten.type_as", "aten.to"}


def pointwise_rule(node: Node, env: Env) -> Decision:
    operands = list(dict.fromkeys(tensor_args(node)))
    if op_name(node) in _CASTS and len(operands) > 1:
        like = operands.pop()
        decision = aligned(node, operands, env)
        return replace(decision, wants={**decision.wants, like: env.spec(like)})
    return aligned(node, operands, env)


def aligned(node: Node, operands: list[Node], env: Env) -> Decision:
    """As any element-wise operation of `operands` is placed."""
    for operand in operands:
        _check_broadcast(operand, env.shape(operand), env.shape(node))
    wants, dims = align(operands, env.shape(node), env)
    kept = _stays_partial(node, wants, env)
    if not kept and any(s.partial for s in wants.values()):
        specs = {n: summed(env.scattered(env.spec(n))) for n in operands}
        wants, dims = align(operands, env.shape(node), env, specs)
    axes = wants[kept[0]].partial if kept else ()
    wants = {n: s if n in kept else summed(s) for n, s in wants.items()}
    return Decision(wants, Spec(dims, axes))


def _check_broadcast(operand: Node, own: Sequence[Size], shape: Sequence[Size]) -> None:
    for size, full in zip(reversed(own), reversed(shape), strict=False):
        if size not in (1, full):
            raise SpecialisedSizeError(f"{operand.name} has size {size} where {full} is meant")


def _stays_partial(node: Node, wants: Mapping[Node, Spec], env: Env) -> tuple[Node, ...]:
    """The operands that may stay sums of parts, because the operation is linear in them.

    All others are summed first. The result is then partial over the same axes.
    """
    summands = [n for n, s in wants.items() if s.partial]
    if not summands:
        return ()
    name = op_name(node)
    if name in _LINEAR and len(wants) == 1:
        if name != "aten.to":
            return tuple(summands)
        # The tensor axis adds up before a cast: what else reads the value then shares the sum, and
        # it is sent as narrow as it was.
        delayed = env.mesh.tensor not in wants[summands[0]].partial
        return tuple(summands) if delayed and _widens(node) else ()
    if name in ("aten.add", "aten.sub") and len(wants) == 2 == len(summands):
        same = len({wants[n].partial for n in summands}) == 1
        return tuple(summands) if same and _may_delay(summands, wants, env) else ()
    if name == "aten.mul":
        keep = max(summands, key=lambda n: len(wants[n].partial))
    elif name == "aten.div" and node.args[0] in summands and not _rounds(node):
        keep = node.args[0]
    else:
        return ()
    others = [s for n, s in wants.items() if n is not keep]
    if len(wants) == 1 and list(node.args).count(keep) > 1:
        return ()  # x * x
    clash = any(set(wants[keep].partial) & set(s.axes) for s in others)
    return () if clash else (keep,)


def _may_delay(summands: list[Node], wants: Mapping[Node, Spec], env: Env) -> bool:
    """Over the tensor axis a sum waits only for another row-parallel result to join it.

    A residual stream left as a sum would be whole on every tensor rank.
    """
    axis = env.mesh.tensor
    if axis is None or all(axis not in wants[n].partial for n in summands):
        return True
    return all(env.role(n) == "row" for n in summands)


def _rounds(node: Node) -> bool:
    return len(node.args) > 2 or node.kwargs.get("rounding_mode") is not None


def _widens(node: Node) -> bool:
    new, old = node.meta["val"].dtype, node.args[0].meta["val"].dtype
    return new.is_floating_point and (not old.is_floating_point or new.itemsize >= old.itemsize)
