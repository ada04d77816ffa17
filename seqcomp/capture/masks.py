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
from seqcomp.layout.masks import Causal, Full, Mask
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
        empty_rows = isinstance(mask, Causal) and mask.offset < 0
        return None if empty_rows and hidden != -math.inf else mask

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
        ones = torch.ones(square.shape, dtype=torch.bool, device=square.device)
        lower = AtLeastZero(Affine((*lead, 1, -1)))
        if torch.equal(square.to(torch.bool), ones.tril()) and (
            square.dtype == torch.bool or bool(((square == 0) | (square == 1)).all())
        ):
            truth = Truth(frozenset({lower}))
            return truth if square.dtype == torch.bool else Choice(truth, 1.0, 0.0)
        if tensor.is_floating_point() and bool((square[ones.tril()] == 0).all()):
            upper = square[~ones.tril()]
            if upper.numel() and bool((upper == upper[0]).all()):
                return Choice(Truth(frozenset({lower})), 0.0, float(upper[0]))
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


def _is_minus_infinity(number: float, node: Node) -> bool:
    """-inf, or a number so low that exp() of it against any real score is 0."""
    return number <= hides_from(node.meta["val"].dtype)


def _as_mask(value: Truth, shape: Sequence[sympy.Expr]) -> Mask | None:
    offsets = []
    for term in value.terms:
        # A dim of size 1 is read at index 0 only; a mask of fewer dims is the same for all rows.
        own = [0 if s == 1 else c for c, s in zip(term.form.coeffs, shape, strict=True)]
        coeffs, const = [0] * (2 - len(own)) + own, term.form.const
        if not const.is_Integer:
            return None
        if not any(coeffs) and const >= 0:
            continue
        if any(coeffs[:-2]) or coeffs[-2:] != [1, -1]:
            return None
        offsets.append(int(const))
    return Causal(min(offsets)) if offsets else Full()
