"""Mask subgraph -> description (layout.masks), by abstract interpretation.

Every node of a mask's subgraph is read as an affine function of its own indices, a boolean made of
comparisons of such functions, or a constant. Nothing is evaluated and no S x S tensor is built:
what comes out is a proof, not a sample. What cannot be read so is `None`, and the caller refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from seqcomp.capture.edit import argument, is_tensor, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.sizes import expression
from seqcomp.layout.masks import Causal, Full, Mask


@dataclass(frozen=True)
class Affine:
    """value[i0, i1, ...] = const + sum(coeffs[d] * i_d)."""

    coeffs: tuple[int, ...]
    const: sympy.Expr = sympy.Integer(0)


@dataclass(frozen=True)
class AtLeastZero:
    """True where the affine function is >= 0."""

    form: Affine


@dataclass(frozen=True)
class Truth:
    """A conjunction of conditions; an empty one is true everywhere, `never` nowhere."""

    terms: frozenset[AtLeastZero] = frozenset()
    never: bool = False


@dataclass(frozen=True)
class Choice:
    """`yes` where the condition holds, `no` elsewhere: a floating, additive mask."""

    condition: Truth
    yes: float
    no: float


Value = Affine | Truth | Choice


class MaskReader:
    """Reads masks of one capture; results are shared between layers."""

    def __init__(self, capture: Capture, constant: Callable[[Node], torch.Tensor | None]):
        self._capture = capture
        self._constant = constant
        self._seen: dict[Node, Value | None] = {}

    def read(self, node: Node) -> Mask | None:
        """The mask of an attention's `attn_mask` argument, or None when it has no such reading."""
        value = self._value(node)
        ndim = node.meta["val"].ndim
        if isinstance(value, Choice):
            if value.yes == 0.0 and _is_minus_infinity(value.no, node):
                value = value.condition
            elif value.no == 0.0 and _is_minus_infinity(value.yes, node):
                value = self._negate(value.condition)
            else:
                return None
        if isinstance(value, Affine) and node.meta["val"].is_floating_point():
            return Full() if not any(value.coeffs) and value.const == 0 else None
        if not isinstance(value, Truth) or value.never:
            return None
        return _as_mask(value, ndim)

    def _value(self, node: Any) -> Value | None:
        if not isinstance(node, Node):
            return None
        if node not in self._seen:
            self._seen[node] = None
            self._seen[node] = self._read(node)
        return self._seen[node]

    def _read(self, node: Node) -> Value | None:
        if not is_tensor(node):
            return None
        if node.op in ("placeholder", "get_attr"):
            return self._read_constant(node)
        name = op_name(node).removeprefix("aten.").strip("_")
        handler = _HANDLERS.get(name)
        return handler(self, node) if handler else None

    def _size(self, item: Any) -> sympy.Expr | None:
        if isinstance(item, Node):
            val = item.meta.get("val")
            is_int = isinstance(val, torch.SymInt | int)
            return expression(val, self._capture.canonical) if is_int else None
        return sympy.Integer(item) if isinstance(item, int) else None

    def _read_constant(self, node: Node) -> Value | None:
        """Buffers that hold a position range or a triangular mask are read by their values."""
        tensor = self._constant(node)
        if tensor is None or tensor.is_meta or tensor.numel() == 0:
            return None
        lead, shape = (0,) * (tensor.ndim - 2), tensor.shape
        if tensor.ndim >= 1 and not tensor.is_floating_point() and tensor.dtype != torch.bool:
            flat = tensor.reshape(-1)
            steps = torch.arange(len(flat), device=flat.device, dtype=flat.dtype)
            if shape[-1] == tensor.numel() and torch.equal(flat, steps + flat[0]):
                return Affine((*(0,) * (tensor.ndim - 1), 1), sympy.Integer(int(flat[0])))
        if tensor.ndim < 2 or math.prod(shape[:-2]) != 1 or shape[-1] > 16384:
            return None
        square = tensor.reshape(shape[-2:])
        ones = torch.ones(square.shape, dtype=torch.bool, device=square.device)
        lower = AtLeastZero(Affine((*lead, 1, -1)))
        if torch.equal(square.to(torch.bool), ones.tril()) and (
            square.dtype == torch.bool or bool(((square == 0) | (square == 1)).all())
        ):
            return Truth(frozenset({lower})) if square.dtype == torch.bool else None
        if tensor.is_floating_point() and bool((square[ones.tril()] == 0).all()):
            upper = square[~ones.tril()]
            if upper.numel() and bool((upper == upper[0]).all()):
                return Choice(Truth(frozenset({lower})), 0.0, float(upper[0]))
        return None

    # The handlers below mirror the semantics of the ATen operation of the same name.

    def _arange(self, node: Node) -> Value | None:
        args = [self._size(a) for a in node.args]
        if any(a is None for a in args) or not args:
            return None
        start = args[0] if len(args) > 1 else sympy.Integer(0)
        step = args[2] if len(args) > 2 else sympy.Integer(1)
        return Affine((int(step),), start) if step.is_Integer else None

    def _fill(self, node: Node) -> Value | None:
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

    def _same(self, node: Node) -> Value | None:
        value = self._value(node.args[0])
        new, old = node.meta["val"].dtype, node.args[0].meta["val"].dtype
        if new == old or (not new.is_floating_point and new != torch.bool and old != torch.bool):
            return value
        if isinstance(value, Truth) and new.is_floating_point:
            return Choice(value, 1.0, 0.0)
        if isinstance(value, Choice) and new.is_floating_point:
            return value
        if isinstance(value, Choice | Truth) and new == torch.bool:
            return self._nonzero(value)
        if isinstance(value, Truth):
            return Choice(value, 1.0, 0.0)
        return None

    def _nonzero(self, value: Value) -> Value | None:
        if isinstance(value, Truth):
            return value
        if isinstance(value, Choice):
            yes, no = bool(value.yes), bool(value.no)
            if yes and not no:
                return value.condition
            if no and not yes:
                return self._negate(value.condition)
            return Truth(never=not yes)
        return None

    def _unsqueeze(self, node: Node) -> Value | None:
        value, dim = self._value(node.args[0]), node.args[1] % node.meta["val"].ndim
        return _map_coeffs(value, lambda c: (*c[:dim], 0, *c[dim:]))

    def _squeeze(self, node: Node) -> Value | None:
        ndim = node.args[0].meta["val"].ndim
        dims = argument(node, 1, "dim")
        if dims is None:
            return None
        gone = {d % ndim for d in (dims if isinstance(dims, list | tuple) else [dims])}
        return _map_coeffs(
            self._value(node.args[0]),
            lambda c: tuple(x for i, x in enumerate(c) if i not in gone),
        )

    def _expand(self, node: Node) -> Value | None:
        return self._aligned(self._value(node.args[0]), node.args[0], node)

    def _transpose(self, node: Node) -> Value | None:
        ndim = node.meta["val"].ndim
        order = list(range(ndim))
        if op_name(node) == "aten.permute":
            order = [d % ndim for d in node.args[1]]
        else:
            a, b = (0, 1) if len(node.args) < 3 else (node.args[1] % ndim, node.args[2] % ndim)
            if ndim < 2:
                return self._value(node.args[0])
            order[a], order[b] = order[b], order[a]
        return _map_coeffs(self._value(node.args[0]), lambda c: tuple(c[i] for i in order))

    def _view(self, node: Node) -> Value | None:
        """Only views that add or remove dims of size 1."""
        value = self._value(node.args[0])
        new, old = self._capture.shape(node), self._capture.shape(node.args[0])
        if [s for s in new if s != 1] != [s for s in old if s != 1] or value is None:
            return None
        kept = iter([i for i, s in enumerate(old) if s != 1])
        order = [next(kept) if s != 1 else None for s in new]
        return _map_coeffs(value, lambda c: tuple(0 if i is None else c[i] for i in order))

    def _slice(self, node: Node) -> Value | None:
        value = self._value(node.args[0])
        dim = argument(node, 1, "dim", 0) % node.meta["val"].ndim
        start = self._size(argument(node, 2, "start", 0) or 0)
        step = argument(node, 4, "step", 1)
        if start is None or start.is_negative or start.has(sympy.Symbol) or step != 1:
            return None
        return _shift(value, dim, start)

    def _select(self, node: Node) -> Value | None:
        dim, index = node.args[1] % node.args[0].meta["val"].ndim, self._size(node.args[2])
        if index is None or index.is_negative:
            return None
        shifted = _shift(self._value(node.args[0]), dim, index)
        return _map_coeffs(shifted, lambda c: (*c[:dim], *c[dim + 1 :]))

    def _index(self, node: Node) -> Value | None:
        value, indices = self._value(node.args[0]), node.args[1]
        if not isinstance(value, Affine | Truth) or any(i is None for i in indices):
            return None
        if len(indices) != node.args[0].meta["val"].ndim:
            return None
        forms = [self._aligned(self._value(i), i, node) for i in indices]
        if any(not isinstance(f, Affine) for f in forms):
            return None
        ndim = node.meta["val"].ndim

        def compose(outer: Affine) -> Affine:
            result = Affine((0,) * ndim, outer.const)
            for coeff, form in zip(outer.coeffs, forms, strict=True):
                result = _combine(result, _scale(form, coeff), 1)
            return result

        if isinstance(value, Affine):
            return compose(value)
        return Truth(frozenset(AtLeastZero(compose(t.form)) for t in value.terms), value.never)

    def _diff(self, node: Node) -> Value | None:
        """First differences of an affine function are its coefficient, everywhere."""
        value = self._value(node.args[0])
        ndim = node.meta["val"].ndim
        n, dim = argument(node, 1, "n", 1), argument(node, 2, "dim", -1) % ndim
        prepend, append = argument(node, 3, "prepend"), argument(node, 4, "append")
        if not isinstance(value, Affine) or n != 1 or append is not None:
            return None
        step = Affine((0,) * ndim, sympy.Integer(value.coeffs[dim]))
        if prepend is None:
            return step
        before = self._value(prepend)
        if not isinstance(before, Affine) or self._capture.shape(prepend)[dim] != 1:
            return None
        first = replace(value, coeffs=_without(value.coeffs, dim))
        jump = _combine(first, replace(before, coeffs=_without(before.coeffs, dim)), -1)
        return step if jump == step else None

    def _cumsum(self, node: Node) -> Value | None:
        value = self._value(node.args[0])
        ndim = node.meta["val"].ndim
        if isinstance(value, Truth) and value.never:
            return Affine((0,) * ndim)
        if isinstance(value, Affine) and not any(value.coeffs) and value.const == 0:
            return value
        return None

    def _add(self, node: Node) -> Value | None:
        return self._sum(node, 1)

    def _sub(self, node: Node) -> Value | None:
        return self._sum(node, -1)

    def _sum(self, node: Node, sign: int) -> Value | None:
        if argument(node, 2, "alpha", 1) != 1:
            return None
        left, right = self._operand(node, 0), self._operand(node, 1)
        if isinstance(left, Affine) and isinstance(right, Affine):
            return _combine(left, right, sign)
        if isinstance(left, Choice) and isinstance(right, Choice) and sign == 1:
            return _add_choices(left, right)
        if isinstance(left, Choice) and isinstance(right, Choice) and left.yes == left.no:
            return Choice(right.condition, left.yes - right.yes, left.no - right.no)
        return None

    def _rsub(self, node: Node) -> Value | None:
        left, right = self._operand(node, 0), self._operand(node, 1)
        if isinstance(left, Affine) and isinstance(right, Affine):
            return _combine(right, left, -1)
        if isinstance(left, Choice) and isinstance(right, Choice) and right.yes == right.no:
            return Choice(left.condition, right.yes - left.yes, right.yes - left.no)
        return None

    def _mul(self, node: Node) -> Value | None:
        left, right = self._operand(node, 0), self._operand(node, 1)
        for a, b in ((left, right), (right, left)):
            if isinstance(a, Choice) and isinstance(b, Choice) and b.yes == b.no:
                products = (a.yes * b.yes, a.no * b.yes)
                if not any(math.isnan(p) for p in products):
                    return Choice(a.condition, *products)
            if isinstance(a, Affine) and isinstance(b, Affine) and not any(b.coeffs):
                return _scale(a, int(b.const)) if b.const.is_Integer else None
        return self._and(node) if node.meta["val"].dtype == torch.bool else None

    def _and(self, node: Node) -> Value | None:
        left, right = self._operand(node, 0), self._operand(node, 1)
        if isinstance(left, Truth) and isinstance(right, Truth):
            return Truth(left.terms | right.terms, left.never or right.never)
        return None

    def _or(self, node: Node) -> Value | None:
        left, right = self._operand(node, 0), self._operand(node, 1)
        if not isinstance(left, Truth) or not isinstance(right, Truth):
            return None
        if left.never or (not right.terms and not right.never):
            return right
        if right.never or not left.terms:
            return left
        return None

    def _not(self, node: Node) -> Value | None:
        value = self._operand(node, 0)
        return self._negate(value) if isinstance(value, Truth) else None

    def _negate(self, value: Truth) -> Truth | None:
        if value.never:
            return Truth()
        if not value.terms:
            return Truth(never=True)
        if len(value.terms) == 1:
            form = next(iter(value.terms)).form
            return Truth(frozenset({AtLeastZero(_minus(form, 1))}))
        return None

    def _compare(self, node: Node) -> Value | None:
        left, right = self._operand(node, 0), self._operand(node, 1)
        if not isinstance(left, Affine) or not isinstance(right, Affine):
            return None
        name = op_name(node).removeprefix("aten.").strip("_")
        difference = _combine(left, right, -1)
        if name in ("eq", "ne"):
            if any(difference.coeffs) or not difference.const.is_Integer:
                return None
            return Truth(never=(difference.const == 0) != (name == "eq"))
        if name in ("le", "lt"):
            difference = _scale(difference, -1)
        if name in ("lt", "gt"):
            difference = replace(difference, const=difference.const - 1)
        if not any(difference.coeffs) and difference.const.is_Integer:
            return Truth(never=difference.const < 0)
        return Truth(frozenset({AtLeastZero(difference)}))

    def _where(self, node: Node) -> Value | None:
        condition = self._operand(node, 0)
        yes, no = self._number(node.args[1]), self._number(node.args[2])
        if isinstance(condition, Truth) and yes is not None and no is not None:
            return Choice(condition, yes, no)
        return None

    def _masked_fill(self, node: Node) -> Value | None:
        base, condition = self._operand(node, 0), self._operand(node, 1)
        fill = self._number(node.args[2])
        if not isinstance(condition, Truth) or fill is None:
            return None
        if isinstance(base, Choice) and base.yes == base.no:
            return Choice(condition, fill, base.yes)
        negated = self._negate(condition)
        if isinstance(base, Choice) and negated == base.condition and fill == base.no:
            return base
        if isinstance(base, Choice) and condition == self._negate(base.condition):
            return Choice(base.condition, base.yes, fill)
        return None

    def _triangle(self, node: Node) -> Value | None:
        diagonal = argument(node, 1, "diagonal", 0)
        value, ndim = self._value(node.args[0]), node.meta["val"].ndim
        keep = Affine((*(0,) * (ndim - 2), 1, -1), sympy.Integer(diagonal))
        if op_name(node).startswith("aten.triu"):
            keep = replace(_scale(keep, -1), const=sympy.Integer(-diagonal))
        kept = Truth(frozenset({AtLeastZero(keep)}))
        if isinstance(value, Truth):
            return Truth(value.terms | kept.terms, value.never)
        if isinstance(value, Choice) and value.yes == value.no:
            return Choice(kept, value.yes, 0.0)
        return None

    def _number(self, item: Any) -> float | None:
        if isinstance(item, int | float) and not isinstance(item, bool):
            return float(item)
        value = self._value(item)
        if isinstance(value, Choice) and value.yes == value.no:
            return value.yes
        if isinstance(value, Affine) and not any(value.coeffs) and value.const.is_Integer:
            return float(value.const)
        return None

    def _operand(self, node: Node, index: int) -> Value | None:
        item = node.args[index] if len(node.args) > index else None
        ndim = node.meta["val"].ndim
        if isinstance(item, Node) and is_tensor(item):
            return self._aligned(self._value(item), item, node)
        if isinstance(item, float):
            return Choice(Truth(), item, item)
        size = self._size(item)
        other = node.args[1 - index] if len(node.args) > 1 and index < 2 else None
        if size is not None and is_tensor(other) and other.meta["val"].is_floating_point():
            return Choice(Truth(), float(size), float(size)) if size.is_Integer else None
        return Affine((0,) * ndim, size) if size is not None else None

    def _aligned(self, value: Value | None, source: Node, node: Node) -> Value | None:
        """`value` with its coefficients lined up to the (broadcast) dims of `node`."""
        missing = node.meta["val"].ndim - source.meta["val"].ndim
        shape = self._capture.shape(source)

        def align(coeffs: tuple[int, ...]) -> tuple[int, ...]:
            # A dim of size 1 is read at index 0 only, whatever the index of the result.
            kept = tuple(0 if s == 1 else c for c, s in zip(coeffs, shape, strict=True))
            return ((0,) * missing + kept) if missing >= 0 else kept[-missing:]

        return _map_coeffs(value, align)


def _map_coeffs(value: Value | None, change: Callable[[Any], tuple[int, ...]]) -> Value | None:
    if isinstance(value, Affine):
        return replace(value, coeffs=change(value.coeffs))
    if isinstance(value, Truth):
        terms = (AtLeastZero(replace(t.form, coeffs=change(t.form.coeffs))) for t in value.terms)
        return Truth(frozenset(terms), value.never)
    if isinstance(value, Choice):
        inner = _map_coeffs(value.condition, change)
        assert isinstance(inner, Truth)
        return replace(value, condition=inner)
    return None


def _shift(value: Value | None, dim: int, start: sympy.Expr) -> Value | None:
    def move(form: Affine) -> Affine:
        return replace(form, const=sympy.expand(form.const + form.coeffs[dim] * start))

    if isinstance(value, Affine):
        return move(value)
    if isinstance(value, Truth):
        return Truth(frozenset(AtLeastZero(move(t.form)) for t in value.terms), value.never)
    if isinstance(value, Choice):
        inner = _shift(value.condition, dim, start)
        assert isinstance(inner, Truth)
        return replace(value, condition=inner)
    return None


def _without(coeffs: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return tuple(0 if i == dim else c for i, c in enumerate(coeffs))


def _combine(left: Affine, right: Affine, sign: int) -> Affine:
    return Affine(
        tuple(a + sign * b for a, b in zip(left.coeffs, right.coeffs, strict=True)),
        sympy.expand(left.const + sign * right.const),
    )


def _scale(form: Affine, factor: int) -> Affine:
    return Affine(tuple(c * factor for c in form.coeffs), sympy.expand(form.const * factor))


def _minus(form: Affine, gap: int) -> Affine:
    negative = _scale(form, -1)
    return replace(negative, const=negative.const - gap)


def _add_choices(left: Choice, right: Choice) -> Choice | None:
    if left.yes == left.no:
        return replace(right, yes=right.yes + left.yes, no=right.no + left.yes)
    if right.yes == right.no:
        return _add_choices(right, left)
    return None


def _is_minus_infinity(number: float, node: Node) -> bool:
    """-inf, or a number so low that exp() of it against any real score is 0 in this dtype."""
    return number == -math.inf or number <= torch.finfo(node.meta["val"].dtype).min / 2


def _as_mask(value: Truth, ndim: int) -> Mask | None:
    offsets = []
    for term in value.terms:
        lead, (q, k) = term.form.coeffs[: ndim - 2], term.form.coeffs[ndim - 2 :]
        if any(lead) or (q, k) != (1, -1) or not term.form.const.is_Integer:
            return None
        offsets.append(int(term.form.const))
    return Causal(min(offsets)) if offsets else Full()


_HANDLERS: dict[str, Callable[[MaskReader, Node], Value | None]] = {
    "arange": MaskReader._arange,
    **dict.fromkeys(
        ("full", "ones", "zeros", "new_ones", "new_zeros", "new_full", "ones_like", "zeros_like",
         "full_like", "scalar_tensor"),
        MaskReader._fill,
    ),
    **dict.fromkeys(("to", "clone", "contiguous", "alias", "detach", "type_as"), MaskReader._same),
    "unsqueeze": MaskReader._unsqueeze,
    "squeeze": MaskReader._squeeze,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), MaskReader._expand),
    **dict.fromkeys(("transpose", "permute", "t"), MaskReader._transpose),
    **dict.fromkeys(("view", "reshape", "unsafe_view"), MaskReader._view),
    "slice": MaskReader._slice,
    "select": MaskReader._select,
    "index": MaskReader._index,
    "diff": MaskReader._diff,
    "cumsum": MaskReader._cumsum,
    "add": MaskReader._add,
    "sub": MaskReader._sub,
    "rsub": MaskReader._rsub,
    "mul": MaskReader._mul,
    **dict.fromkeys(("and", "logical_and", "bitwise_and"), MaskReader._and),
    **dict.fromkeys(("or", "logical_or", "bitwise_or"), MaskReader._or),
    **dict.fromkeys(("logical_not", "bitwise_not"), MaskReader._not),
    **dict.fromkeys(("le", "lt", "ge", "gt", "eq", "ne"), MaskReader._compare),
    "where": MaskReader._where,
    "masked_fill": MaskReader._masked_fill,
    **dict.fromkeys(("tril", "triu"), MaskReader._triangle),
}  # fmt: skip

