"""Mask subgraph -> description (layout.masks), by abstract interpretation.

Every node of a mask's subgraph is read as an affine function of its own indices, a boolean made of
comparisons of such functions, or a constant. Nothing is evaluated and no S x S tensor is built:
what comes out is a proof, not a sample. What cannot be read so is `None`, and the caller refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from seqcomp.capture.edit import is_tensor, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.mask_ops import HANDLERS
from seqcomp.capture.mask_values import (
    Affine,
    AtLeastZero,
    Choice,
    Truth,
    Value,
    map_coeffs,
    negate,
)
from seqcomp.capture.sizes import expression
from seqcomp.layout.masks import Band, Causal, Full, Mask
from seqcomp.runtime.attention.pair_mask import hides_from

# Positions of any real length are exact in these; others round or wrap around.
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)


class MaskReader:
    """Reads masks of one capture; results are shared between layers."""

    def __init__(self, capture: Capture, constant: Callable[[Node], torch.Tensor | None]):
        self.capture = capture
        self._constant = constant
        self._seen: dict[Node, Value | None] = {}

    def read(self, node: Node) -> Mask | None:
        """The mask of an attention's `attn_mask` argument, or None when it has no such reading."""
        value = self.value(node)
        hidden = -math.inf
        if isinstance(value, Choice):
            if value.yes == value.no == 0.0:
                value = Truth()
            elif value.yes == 0.0 and _is_minus_infinity(value.no, node):
                value, hidden = value.condition, value.no
            elif value.no == 0.0 and _is_minus_infinity(value.yes, node):
                value, hidden = negate(value.condition), value.yes
            else:
                return None
        if isinstance(value, Affine) and node.meta["val"].is_floating_point():
            return Full() if not any(value.coeffs) and value.const == 0 else None
        if not isinstance(value, Truth) or value.never:
            return None
        mask = _as_mask(value, self.capture.shape(node))
        # A row that hides every key: -inf gives 0, a finite number the mean over all keys.
        return mask if hidden == -math.inf or _sees_itself(mask) else None

    def value(self, node: Any) -> Value | None:
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
        handler = HANDLERS.get(name)
        value = handler(self, node) if handler else None
        exact = not isinstance(value, Affine) or node.meta["val"].dtype in _EXACT
        return value if exact else None

    def size(self, item: Any) -> sympy.Expr | None:
        if isinstance(item, Node):
            val = item.meta.get("val")
            is_int = isinstance(val, torch.SymInt | int)
            return expression(val, self.capture.canonical) if is_int else None
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
        if bool(((square == 0) | (square == 1)).all()):
            band = _band_of(square != 0, lead)
            return band if square.dtype == torch.bool or not band else Choice(band, 1.0, 0.0)
        band = _band_of(square == 0, lead) if square.is_floating_point() else None
        hidden = square[square != 0]
        if band is not None and bool((hidden == hidden[0]).all()):
            return Choice(band, 0.0, float(hidden[0]))
        return None

    def number(self, item: Any) -> float | None:
        if isinstance(item, int | float) and not isinstance(item, bool):
            return float(item)
        value = self.value(item)
        if isinstance(value, Choice) and value.yes == value.no:
            return value.yes
        if isinstance(value, Affine) and not any(value.coeffs) and value.const.is_Integer:
            return float(value.const)
        return None

    def operand(self, node: Node, index: int) -> Value | None:
        item = node.args[index] if len(node.args) > index else None
        ndim = node.meta["val"].ndim
        if isinstance(item, Node) and is_tensor(item):
            return self.aligned(self.value(item), item, node)
        if isinstance(item, float):
            return Choice(Truth(), item, item)
        size = self.size(item)
        other = node.args[1 - index] if len(node.args) > 1 and index < 2 else None
        if size is not None and is_tensor(other) and other.meta["val"].is_floating_point():
            return Choice(Truth(), float(size), float(size)) if size.is_Integer else None
        return Affine((0,) * ndim, size) if size is not None else None

    def aligned(self, value: Value | None, source: Node, node: Node) -> Value | None:
        """`value` with its coefficients lined up to the (broadcast) dims of `node`."""
        missing = node.meta["val"].ndim - source.meta["val"].ndim
        shape = self.capture.shape(source)

        def align(coeffs: tuple[int, ...]) -> tuple[int, ...]:
            # A dim of size 1 is read at index 0 only, whatever the index of the result.
            kept = tuple(0 if s == 1 else c for c, s in zip(coeffs, shape, strict=True))
            return ((0,) * missing + kept) if missing >= 0 else kept[-missing:]

        return map_coeffs(value, align)


def _band_of(seen: torch.Tensor, lead: tuple[int, ...]) -> Truth | None:
    """low <= row - column <= high where this is what a table holds, and it hides something."""
    rows, columns = seen.shape
    in_row, in_column = (x.nonzero().flatten().tolist() for x in (seen[0], seen[:, 0]))
    if not (in_row or in_column) or bool(seen.all()):
        return None
    low = -in_row[-1] if in_row else in_column[0]
    high = in_column[-1] if in_column else -in_row[0]
    if not torch.equal(seen, torch.ones_like(seen).tril(-low).triu(-high)):
        return None
    terms = []
    # What the table does not show, it does not say: a limit outside of it is none.
    if low > 1 - columns:
        terms.append(AtLeastZero(Affine((*lead, 1, -1), sympy.Integer(-low))))
    if high < rows - 1:
        terms.append(AtLeastZero(Affine((*lead, -1, 1), sympy.Integer(high))))
    return Truth(frozenset(terms))


def _is_minus_infinity(number: float, node: Node) -> bool:
    """-inf, or a number so low that exp() of it against any real score is 0."""
    return number <= hides_from(node.meta["val"].dtype)


def _as_mask(value: Truth, shape: Sequence[sympy.Expr]) -> Mask | None:
    lows: list[int] = []
    highs: list[int] = []
    for term in value.terms:
        # A dim of size 1 is read at index 0 only; a mask of fewer dims is the same for all rows.
        own = [0 if s == 1 else c for c, s in zip(term.form.coeffs, shape, strict=True)]
        coeffs, const = [0] * (2 - len(own)) + own, term.form.const
        if not const.is_Integer:
            return None
        if not any(coeffs) and const >= 0:
            continue
        slope = coeffs[-2]
        if any(coeffs[:-2]) or slope == 0 or coeffs[-1] != -slope:
            return None
        # slope * (query - key) + const >= 0
        bound = int(const) // abs(slope)
        (lows if slope > 0 else highs).append(-bound if slope > 0 else bound)
    low, high = max(lows, default=None), min(highs, default=None)
    if high is not None:
        return Band(low, high) if low is None or low <= high else None
    return Full() if low is None else Causal(-low)


def _sees_itself(mask: Mask | None) -> bool:
    limits = mask.limits if mask is not None else None
    if limits is None:
        return True
    low, high = limits.low, limits.high
    return (low is None or low <= 0) and (high is None or high >= 0)
