"""How each ATen operation acts on mask values; one reader per operation of the same name."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from seqcomp.capture.edit import argument, op_name
from seqcomp.capture.mask_moves import MOVERS, MaskReader, Reading
from seqcomp.capture.mask_values import (
    Affine,
    AtLeastZero,
    Choice,
    Truth,
    Value,
    add_choices,
    combine,
    negate,
    nonzero,
    scale,
    without,
)


def _arange(reader: MaskReader, node: Node) -> Value | None:
    args = [reader.size(a) for a in node.args]
    if any(a is None for a in args) or not args:
        return None
    start = args[0] if len(args) > 1 else sympy.Integer(0)
    step = args[2] if len(args) > 2 else sympy.Integer(1)
    return Affine((int(step),), start) if step.is_Integer else None


def _fill(reader: MaskReader, node: Node) -> Value | None:
    name = op_name(node).removeprefix("aten.")
    ndim, dtype = node.meta["val"].ndim, node.meta["val"].dtype
    if "ones" in name:
        value: Any = 1
    elif "zeros" in name:
        value = 0
    elif name == "scalar_tensor":
        value = node.args[0]
    else:
        value = argument(node, 2 if name == "new_full" else 1, "fill_value")
    if isinstance(value, Node) or value is None:
        return None
    if dtype == torch.bool:
        return Truth(never=not value)
    if dtype.is_floating_point:
        return Choice(Truth(), float(value), float(value))
    return Affine((0,) * ndim, sympy.Integer(int(value)))


def _same(reader: MaskReader, node: Node) -> Value | None:
    value = reader.value(node.args[0])
    new, old = node.meta["val"].dtype, node.args[0].meta["val"].dtype
    if new == old:
        return value
    if not new.is_floating_point and torch.bool not in (new, old):
        whole = not isinstance(value, Choice) or all(
            float(v).is_integer() for v in (value.yes, value.no)
        )
        return value if whole else None  # a fraction is cut off, an infinity undefined
    if isinstance(value, Truth) and new.is_floating_point:
        return Choice(value, 1.0, 0.0)
    if isinstance(value, Choice) and new.is_floating_point:
        return value
    if isinstance(value, Choice | Truth) and new == torch.bool:
        return nonzero(value)
    if isinstance(value, Truth):
        return Choice(value, 1.0, 0.0)
    return None


def _diff(reader: MaskReader, node: Node) -> Value | None:
    """First differences of an affine function are its coefficient, everywhere."""
    value = reader.value(node.args[0])
    ndim = node.meta["val"].ndim
    n, dim = argument(node, 1, "n", 1), argument(node, 2, "dim", -1) % ndim
    prepend, append = argument(node, 3, "prepend"), argument(node, 4, "append")
    if not isinstance(value, Affine) or n != 1 or append is not None:
        return None
    step = Affine((0,) * ndim, sympy.Integer(value.coeffs[dim]))
    if prepend is None:
        return step
    before = reader.value(prepend)
    if not isinstance(before, Affine) or reader.capture.shape(prepend)[dim] != 1:
        return None
    first = replace(value, coeffs=without(value.coeffs, dim))
    jump = combine(first, replace(before, coeffs=without(before.coeffs, dim)), -1)
    return step if jump == step else None


def _cumsum(reader: MaskReader, node: Node) -> Value | None:
    value = reader.value(node.args[0])
    ndim = node.meta["val"].ndim
    if isinstance(value, Truth) and value.never:
        return Affine((0,) * ndim)
    if isinstance(value, Affine) and not any(value.coeffs) and value.const == 0:
        return value
    return None


def _add(reader: MaskReader, node: Node) -> Value | None:
    return _sum(reader, node, 1)


def _sub(reader: MaskReader, node: Node) -> Value | None:
    return _sum(reader, node, -1)


def _sum(reader: MaskReader, node: Node, sign: int) -> Value | None:
    if argument(node, 2, "alpha", 1) != 1:
        return None
    left, right = reader.operand(node, 0), reader.operand(node, 1)
    if isinstance(left, Affine) and isinstance(right, Affine):
        return combine(left, right, sign)
    if isinstance(left, Choice) and isinstance(right, Choice) and sign == 1:
        return add_choices(left, right)
    if isinstance(left, Choice) and isinstance(right, Choice) and left.yes == left.no:
        return Choice(right.condition, left.yes - right.yes, left.no - right.no)
    return None


def _rsub(reader: MaskReader, node: Node) -> Value | None:
    if argument(node, 2, "alpha", 1) != 1:
        return None
    left, right = reader.operand(node, 0), reader.operand(node, 1)
    if isinstance(left, Affine) and isinstance(right, Affine):
        return combine(right, left, -1)
    if isinstance(left, Choice) and isinstance(right, Choice) and right.yes == right.no:
        return Choice(left.condition, right.yes - left.yes, right.yes - left.no)
    return None


def _mul(reader: MaskReader, node: Node) -> Value | None:
    left, right = reader.operand(node, 0), reader.operand(node, 1)
    for a, b in ((left, right), (right, left)):
        if isinstance(a, Choice) and isinstance(b, Choice) and b.yes == b.no:
            products = (a.yes * b.yes, a.no * b.yes)
            if not any(math.isnan(p) for p in products):
                return Choice(a.condition, *products)
        if isinstance(a, Affine) and isinstance(b, Affine) and not any(b.coeffs):
            return scale(a, int(b.const)) if b.const.is_Integer else None
    return _and(reader, node) if node.meta["val"].dtype == torch.bool else None


def _and(reader: MaskReader, node: Node) -> Value | None:
    left, right = reader.operand(node, 0), reader.operand(node, 1)
    if isinstance(left, Truth) and isinstance(right, Truth):
        return _both(left, right)
    return None


def _both(left: Truth, right: Truth) -> Truth:
    return Truth(left.terms | right.terms, left.never or right.never)


def _or(reader: MaskReader, node: Node) -> Value | None:
    left, right = reader.operand(node, 0), reader.operand(node, 1)
    if not isinstance(left, Truth) or not isinstance(right, Truth):
        return None
    if left.never or (not right.terms and not right.never):
        return right
    if right.never or not left.terms:
        return left
    return None


def _not(reader: MaskReader, node: Node) -> Value | None:
    value = reader.operand(node, 0)
    return negate(value) if isinstance(value, Truth) else None


def _compare(reader: MaskReader, node: Node) -> Value | None:
    left, right = reader.operand(node, 0), reader.operand(node, 1)
    name = op_name(node).removeprefix("aten.").strip("_")
    if isinstance(left, Choice) and isinstance(right, Choice) and right.yes == right.no:
        yes, no = (getattr(operator, name)(v, right.yes) for v in (left.yes, left.no))
        return nonzero(Choice(left.condition, float(yes), float(no)))
    if not isinstance(left, Affine) or not isinstance(right, Affine):
        return None
    difference = combine(left, right, -1)
    if name in ("eq", "ne"):
        if any(difference.coeffs) or not difference.const.is_Integer:
            return None
        return Truth(never=(difference.const == 0) != (name == "eq"))
    if name in ("le", "lt"):
        difference = scale(difference, -1)
    if name in ("lt", "gt"):
        difference = replace(difference, const=difference.const - 1)
    if not any(difference.coeffs) and difference.const.is_Integer:
        return Truth(never=difference.const < 0)
    return Truth(frozenset({AtLeastZero(difference)}))


def _where(reader: MaskReader, node: Node) -> Value | None:
    condition = reader.operand(node, 0)
    yes, no = reader.number(node.args[1]), reader.number(node.args[2])
    if not isinstance(condition, Truth):
        return None
    if yes is not None and no is not None:
        return Choice(condition, yes, no)
    # Hidden twice with the same number.
    inner, low = reader.operand(node, 1 if yes is None else 2), no if yes is None else yes
    outer = condition if yes is None else negate(condition)
    if isinstance(inner, Choice) and inner.no == low and outer is not None:
        return replace(inner, condition=_both(outer, inner.condition))
    return None


def _masked_fill(reader: MaskReader, node: Node) -> Value | None:
    base, condition = reader.operand(node, 0), reader.operand(node, 1)
    fill = reader.number(node.args[2])
    if not isinstance(condition, Truth) or fill is None:
        return None
    if isinstance(base, Choice) and base.yes == base.no:
        return Choice(condition, fill, base.yes)
    negated = negate(condition)
    if isinstance(base, Choice) and negated == base.condition and fill == base.no:
        return base
    if isinstance(base, Choice) and condition == negate(base.condition):
        return Choice(base.condition, base.yes, fill)
    if isinstance(base, Choice) and negated is not None:
        # Filled with the same number twice: what neither condition names is left.
        flipped = negate(base.condition)
        if fill == base.yes and flipped is not None:
            base = Choice(flipped, base.no, base.yes)
        if fill == base.no:
            return replace(base, condition=_both(base.condition, negated))
    return None


def _triangle(reader: MaskReader, node: Node) -> Value | None:
    diagonal = reader.size(argument(node, 1, "diagonal", 0))
    if diagonal is None:
        return None
    value, ndim = reader.value(node.args[0]), node.meta["val"].ndim
    keep = Affine((*(0,) * (ndim - 2), 1, -1), diagonal)
    if op_name(node).startswith("aten.triu"):
        keep = scale(keep, -1)
    kept = Truth(frozenset({AtLeastZero(keep)}))
    if isinstance(value, Truth):
        return Truth(value.terms | kept.terms, value.never)
    if isinstance(value, Choice) and value.yes == value.no:
        return Choice(kept, value.yes, 0.0)
    return None


HANDLERS: dict[str, Reading] = {
    "arange": _arange,
    **dict.fromkeys(
        ("full", "ones", "zeros", "new_ones", "new_zeros", "new_full", "ones_like", "zeros_like",
         "full_like", "scalar_tensor"),
        _fill,
    ),
    **dict.fromkeys(("to", "clone", "contiguous", "alias", "detach", "type_as"), _same),
    **MOVERS,
    "diff": _diff,
    "cumsum": _cumsum,
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _mul,
    **dict.fromkeys(("and", "logical_and", "bitwise_and"), _and),
    **dict.fromkeys(("or", "logical_or", "bitwise_or"), _or),
    **dict.fromkeys(("logical_not", "bitwise_not"), _not),
    **dict.fromkeys(("le", "lt", "ge", "gt", "eq", "ne"), _compare),
    "where": _where,
    "masked_fill": _masked_fill,
    **dict.fromkeys(("tril", "triu"), _triangle),
}  # fmt: skip
