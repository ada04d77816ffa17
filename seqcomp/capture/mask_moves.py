"""How operations that move, add or drop dims act on mask values; one reader per operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import sympy
from torch.fx import Node

from seqcomp.capture.edit import TRANSPOSITIONS, argument, transposed_dims
from seqcomp.capture.export import Capture
from seqcomp.capture.mask_values import (
    Affine,
    AtLeastZero,
    Truth,
    Value,
    combine,
    map_coeffs,
    scale,
    shift,
)


class MaskReader(Protocol):
    """What an operation may ask about its operands."""

    capture: Capture

    def value(self, node: Any) -> Value | None: ...

    def size(self, item: Any) -> sympy.Expr | None: ...

    def number(self, item: Any) -> float | None: ...

    def operand(self, node: Node, index: int) -> Value | None: ...

    def aligned(self, value: Value | None, source: Node, node: Node) -> Value | None: ...


Reading: TypeAlias = Callable[[MaskReader, Node], Value | None]


def _unsqueeze(reader: MaskReader, node: Node) -> Value | None:
    value, dim = reader.value(node.args[0]), node.args[1] % node.meta["val"].ndim
    return map_coeffs(value, lambda c: (*c[:dim], 0, *c[dim:]))


def _squeeze(reader: MaskReader, node: Node) -> Value | None:
    ndim = node.args[0].meta["val"].ndim
    dims = argument(node, 1, "dim")
    if dims is None:
        return None
    gone = {d % ndim for d in (dims if isinstance(dims, list | tuple) else [dims])}
    gone = {d for d in gone if reader.capture.shape(node.args[0])[d] == 1}
    return map_coeffs(
        reader.value(node.args[0]),
        lambda c: tuple(x for i, x in enumerate(c) if i not in gone),
    )


def _expand(reader: MaskReader, node: Node) -> Value | None:
    return reader.aligned(reader.value(node.args[0]), node.args[0], node)


def _transpose(reader: MaskReader, node: Node) -> Value | None:
    order = transposed_dims(node)
    assert order is not None
    return map_coeffs(reader.value(node.args[0]), lambda c: tuple(c[i] for i in order))


def _view(reader: MaskReader, node: Node) -> Value | None:
    """Only views that add or remove dims of size 1."""
    value = reader.value(node.args[0])
    new, old = reader.capture.shape(node), reader.capture.shape(node.args[0])
    if [s for s in new if s != 1] != [s for s in old if s != 1] or value is None:
        return None
    kept = iter([i for i, s in enumerate(old) if s != 1])
    order = [next(kept) if s != 1 else None for s in new]
    return map_coeffs(value, lambda c: tuple(0 if i is None else c[i] for i in order))


def _slice(reader: MaskReader, node: Node) -> Value | None:
    value = reader.value(node.args[0])
    dim = argument(node, 1, "dim", 0) % node.meta["val"].ndim
    start = reader.size(argument(node, 2, "start", 0) or 0)
    step = argument(node, 4, "step", 1)
    if start is None or start.is_negative or start.has(sympy.Symbol) or step != 1:
        return None
    return shift(value, dim, start)


def _select(reader: MaskReader, node: Node) -> Value | None:
    dim, index = node.args[1] % node.args[0].meta["val"].ndim, reader.size(node.args[2])
    if index is None or index.is_negative:
        return None
    shifted = shift(reader.value(node.args[0]), dim, index)
    return map_coeffs(shifted, lambda c: (*c[:dim], *c[dim + 1 :]))


def _index(reader: MaskReader, node: Node) -> Value | None:
    value, indices = reader.value(node.args[0]), node.args[1]
    if not isinstance(value, Affine | Truth) or any(i is None for i in indices):
        return None
    if len(indices) != node.args[0].meta["val"].ndim:
        return None
    forms = [reader.aligned(reader.value(i), i, node) for i in indices]
    if any(not isinstance(f, Affine) for f in forms):
        return None
    if any(not f.const.is_nonnegative or min(f.coeffs, default=0) < 0 for f in forms):
        return None  # a negative index counts from the end
    ndim = node.meta["val"].ndim

    def compose(outer: Affine) -> Affine:
        result = Affine((0,) * ndim, outer.const)
        for coeff, form in zip(outer.coeffs, forms, strict=True):
            result = combine(result, scale(form, coeff), 1)
        return result

    if isinstance(value, Affine):
        return compose(value)
    return Truth(frozenset(AtLeastZero(compose(t.form)) for t in value.terms), value.never)


MOVERS: dict[str, Reading] = {
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys((name.removeprefix("aten.") for name in TRANSPOSITIONS), _transpose),
    **dict.fromkeys(("view", "reshape", "unsafe_view"), _view),
    "slice": _slice,
    "select": _select,
    "index": _index,
}
