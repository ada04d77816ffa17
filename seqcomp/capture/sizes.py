"""Symbolic sizes: every size of a captured graph as a sympy expression in B and S.

B is the *global* batch (all data ranks), S the global sequence length. Sizes of the inputs that
mean the same get the same symbol, so that a dim can be recognised by its expression alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

Size: TypeAlias = sympy.Expr

BATCH_SYMBOL = sympy.Symbol("B", positive=True, integer=True)
LENGTH_SYMBOL = sympy.Symbol("S", positive=True, integer=True)


def expression(value: Any, canonical: Mapping[Size, Size]) -> Size:
    """The size `value` (int or SymInt) with the symbols of the capture replaced by B and S.

    A number is replaced too where `canonical` has it.
    """
    if isinstance(value, torch.SymInt):
        found = sympy.expand(value.node.expr.xreplace(dict(canonical)))
        return found.replace(FloorDiv, _quotient) if found.has(FloorDiv) else found
    number = sympy.Integer(int(value))
    return canonical.get(number, number)


class SpecialisedSizeError(Exception):
    """A value has a fixed size where another has a symbolic one: the capture is for one size."""


def divide(total: Size, part: Size) -> Size | None:
    """total / part where that is a whole number for every B and S, else None."""
    if total == part:
        return sympy.Integer(1)
    if total.is_Integer and part.is_Integer:
        return total // part if total % part == 0 else None
    quotient = sympy.cancel(total / part)
    numerator, denominator = sympy.fraction(sympy.together(quotient))
    if denominator != 1:
        return None
    return sympy.expand(numerator)


def _quotient(total: Size, part: Size) -> Size:
    exact = divide(total, part)
    return FloorDiv(total, part) if exact is None else exact


def common(left: Size, right: Size) -> Size:
    """Greatest common divisor of two sizes."""
    return sympy.gcd(left, right)


def product(sizes: Iterable[Size]) -> Size:
    total: Size = sympy.Integer(1)
    for size in sizes:
        total = total * size
    return sympy.expand(total)


def evaluate(size: Size, values: Mapping[sympy.Symbol, int]) -> int:
    if size.is_Integer:
        return int(size)
    if size in values:
        return int(values[size])
    return int(size.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()}))


_TARGETS = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
}


class SizeEmitter:
    """Writes size expressions as graph nodes, each once, after a given node of the root."""

    def __init__(self, graph: torch.fx.Graph, symbols: Mapping[sympy.Symbol, torch.fx.Node]):
        self._graph = graph
        self._nodes: dict[Size, torch.fx.Node | int] = dict(symbols)

    def emit(self, size: Size, before: torch.fx.Node) -> torch.fx.Node | int:
        size = sympy.expand(size)
        if size.is_Integer:
            return int(size)
        if size in self._nodes:
            return self._nodes[size]
        target = _TARGETS.get(size.func, operator.mul)
        result: torch.fx.Node | int | None = None
        if size.is_Pow and size.exp.is_Integer and size.exp > 1:
            parts: tuple[Size, ...] = (size.base,) * int(size.exp)
        elif size.func in _TARGETS:
            parts = size.args
        else:
            raise NotImplementedError(f"size {size}")
        for part in parts:
            value = self.emit(part, before)
            if result is None:
                result = value
                continue
            with self._graph.inserting_before(before):
                node = self._graph.call_function(target, (result, value))
            node.meta["nn_module_stack"] = {}
            node.meta["size"] = True
            result = node
        assert result is not None
        self._nodes[size] = result
        return result
