"""Keeps padded tokens out of everything that adds up over tokens.

Where an operation runs on shared-out tokens, its result has the same tokens shared out, so that
padding stays padding and nothing real depends on it; or it is a sum over them, and the padding is
made zero first. Anything else is refused: no operation runs on padding that nobody thought of.
Attention hides padded keys itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from seqcomp.capture.edit import argument, op_name, place_of
from seqcomp.capture.sizes import LENGTH_SYMBOL, Size, product
from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.lowering.context import LoweringContext
from seqcomp.lowering.redistribute import Redistributor, common_scope
from seqcomp.placement.rule import Decision
from seqcomp.placement.spec import Dim, Spec

aten = torch.ops.aten

# Additive in every operand: zeros for a token add nothing.
_SUMS = {
    "aten.sum", "aten.mean", "aten.matmul", "aten.__matmul__", "aten.mm", "aten.bmm", "aten.addmm",
    "aten.baddbmm", "aten.einsum",
}  # fmt: skip
# Position of `reduction` in the losses.
_LOSSES = {
    "aten.cross_entropy_loss": 3, "aten.nll_loss_nd": 3, "aten.nll_loss": 3, "aten.mse_loss": 2,
    "aten.l1_loss": 2, "aten.smooth_l1_loss": 2, "aten.huber_loss": 2,
    "aten.binary_cross_entropy_with_logits": 4, "aten.binary_cross_entropy": 3, "aten.kl_div": 2,
}  # fmt: skip
_CLASSES = ("aten.cross_entropy_loss", "aten.nll_loss_nd", "aten.nll_loss")
# Their second tensor only lends its dtype.
_CASTS = ("aten.to", "aten.type_as")

Places = dict[Node, list[tuple[int, int]]]
"""Per operand the (dim, factor) of tokens that the operation sums over."""


def padding_in(node: Node, decision: Decision, context: LoweringContext) -> Places:
    """Where an operation would add up padded tokens. Raises PlanError SC212 where it is not known
    what it would do with them."""
    mesh = context.mesh
    if not mesh.pads:
        return {}
    outs = decision.out if isinstance(decision.out, tuple) else (decision.out,)
    for spec in (*outs, *decision.wants.values()):
        _check_whole_tokens(node, spec, context)
    found: Places = {}
    for operand, want in decision.wants.items():
        if decision.form == "tokens":
            continue  # of real tokens alone
        if decision.form == "create" or (op_name(node) in _CASTS and operand is not node.args[0]):
            continue
        if op_name(node) == "attention" and operand not in node.args[:3]:
            continue  # described by rules and vectors, which know the length
        for index, at in _padded(want, context):
            axes = set(want.dims[index][at].axes)
            kept = all(axes <= set(_token_axes(out, context)) for out in outs)
            if kept:
                continue
            known = op_name(node) in _SUMS or op_name(node) in _LOSSES
            if not known or not all(axes <= set(out.partial) for out in outs):
                raise _refused(node, f"{op_name(node)} on tokens of a padded sequence")
            found.setdefault(operand, []).append((index, at))
    return {} if op_name(node) in _LOSSES else found


@dataclass(frozen=True)
class PaddedLoss:
    """A loss over padded tokens: its dims before it is reduced, and of how many it is the mean."""

    dims: tuple[Dim, ...]
    places: tuple[tuple[int, int], ...]
    count: Size | None

    @staticmethod
    def of(node: Node, decision: Decision, context: LoweringContext) -> PaddedLoss | None:
        """None for other operations, and for losses that are not reduced over such tokens."""
        name = op_name(node)
        if not context.mesh.pads or name not in _LOSSES:
            return None
        reduction = argument(node, _LOSSES[name], "reduction", 1)
        dims = _dims_of_each(node, decision) if reduction else ()
        places = tuple(_padded(Spec(dims), context))
        if not places:
            return None
        shapes = [context.capture.shape(x) for x in node.args[:2]]
        if name not in _CLASSES and shapes[0] != shapes[1]:
            raise _refused(node, f"{name} of operands that broadcast")
        return PaddedLoss(dims, places, product(shapes[0]) if reduction == 1 else None)

    def lowered(self, node: Node, made: Redistributor) -> Node:
        """Makes `node` give one value per token; returns the sum or mean of the real ones."""
        _set_argument(node, _LOSSES[op_name(node)], "reduction", 0)
        after, value = node.next, node
        scope = common_scope(node, node)
        for index, at in self.places:
            value = made.hidden(value, index, self.dims[index], at, after)
        total = made.call(aten.sum.default, (value,), after, scope, node)
        if self.count is None:
            return total
        return made.call(aten.div.Scalar, (total, made.size(self.count, after)), after, scope, node)


def real_degree(node: Node, degree: int, made: Redistributor) -> Node:
    """By what the mean of zero-filled padded parts is divided, for their sum to be the mean."""
    length, padded = made.size(LENGTH_SYMBOL, node), made.padded_length(node)
    return made.call(_times_share, (degree, length, padded), node, common_scope(node, node), node)


def _times_share(degree: int, length: int, padded: int) -> float:
    return degree * length / padded


def _padded(spec: Spec, context: LoweringContext) -> Iterator[tuple[int, int]]:
    for index, dim in enumerate(spec.dims):
        for at, factor in enumerate(dim):
            if context.mesh.is_padded(factor):
                yield index, at


def _token_axes(spec: Spec, context: LoweringContext) -> tuple[str, ...]:
    return tuple(a for i, at in _padded(spec, context) for a in spec.dims[i][at].axes)


def _check_whole_tokens(node: Node, spec: Spec, context: LoweringContext) -> None:
    for dim in spec.dims:
        for factor in dim:
            shared = set(factor.axes) & set(context.mesh.sequence)
            if shared and factor.size != LENGTH_SYMBOL and factor.size.has(LENGTH_SYMBOL):
                raise _refused(node, f"{op_name(node)} shares out {factor.size} elements")


def _dims_of_each(node: Node, decision: Decision) -> tuple[Dim, ...]:
    """The dims of a loss before it is reduced."""
    dims = decision.wants[node.args[0]].dims
    if op_name(node) not in _CLASSES:
        return dims
    classes = 1 if len(dims) > 1 else 0
    return (*dims[:classes], *dims[classes + 1 :])


def _set_argument(node: Node, position: int, name: str, value: Any) -> None:
    if len(node.args) > position:
        node.args = (*node.args[:position], value, *node.args[position + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: value}


def _refused(node: Node, found: str) -> PlanError:
    return PlanError(
        [
            diagnostic(
                "SC212",
                where=place_of(node),
                found=found,
                legal="lengths that need no padding, or operations with a rule for it",
                help="use a length that divides and padding: none",
            )
        ]
    )
