"""Bounds of a pair mask on every block of a grid, by interval arithmetic.

Nothing of size S x S is made: an operation costs as much as the grid has blocks. Bounds hold for
the numbers that the program gives in its own dtypes, rounding included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqcomp.runtime.attention.pair_mask import (
    Apply,
    Leaf,
    Lookup,
    Number,
    PairMask,
    Position,
    rectangle,
    run,
)


@dataclass(frozen=True)
class Interval:
    """Bounds of the values in each block: broadcastable to [B, H, query blocks, key blocks]."""

    low: Tensor
    high: Tensor


def bounds(
    mask: PairMask,
    leaves: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    blocks: tuple[int, int],
) -> Interval:
    """Bounds of the mask on every block of blocks[0] queries x blocks[1] keys (the last may be
    smaller), of each sample and head, in fp64. Booleans count as 0 and 1.
    """
    grid = _Grid(mask, leaves, q, k, blocks)
    found = grid.interval(mask.term)
    shape = (1, 1, -(-len(q) // blocks[0]), -(-len(k) // blocks[1]))
    low, high = (
        torch.broadcast_to(x, torch.broadcast_shapes(x.shape, shape))
        for x in (found.low, found.high)
    )
    return Interval(low, high)


class _Grid:
    def __init__(
        self,
        mask: PairMask,
        leaves: Sequence[Tensor],
        q: Tensor,
        k: Tensor,
        blocks: tuple[int, int],
    ):
        self._leaves = leaves
        self._positions = {"query": q.view(1, 1, -1, 1), "key": k.view(1, 1, 1, -1)}
        self._q, self._k = q, k
        self._blocks = blocks
        self._known: dict[int, Interval] = {}
        # One pair tells the dtypes: that of an operation's result, and that it computes in.
        self._dtypes: dict[int, tuple[torch.dtype, torch.dtype]] = {}
        one = [
            leaf[:, :1] if index in mask.tables else rectangle(leaf, q[:1], k[:1])[:1, :1]
            for index, leaf in enumerate(leaves)
        ]
        run(mask.term, one, q[:1].view(1, 1, 1, 1), k[:1].view(1, 1, 1, 1), self._note)

    def _note(self, term: Apply, result: Tensor, operands: list[Any]) -> None:
        compute = result.dtype
        if term.name in _COMPARISONS:
            compute = torch.result_type(*operands[:2])
        self._dtypes[id(term)] = (result.dtype, compute)

    def interval(self, term: Any) -> Interval:
        match term:
            case Leaf(index):
                return self._leaf(index)
            case Position(of):
                return self._ends(self._positions[of].double())
            case Number(value, dtype):
                return self._number(torch.tensor(value, dtype=dtype).double())
            case int() | float() | bool():
                return self._number(torch.tensor(float(term), dtype=torch.float64))
            case Lookup(table, _):
                rows = self._leaves[table]
                low, high = (x[None].double() for x in (rows.amin(0), rows.amax(0)))
                return _without_nan(low, high)
            case Apply():
                if id(term) not in self._known:
                    self._known[id(term)] = self._apply(term)
                return self._known[id(term)]
        return self._unknown()

    def _apply(self, term: Apply) -> Interval:
        rule = _RULES.get(term.name)
        named = dict(term.kwargs)
        if rule is None or named.get("alpha", 1) != 1:
            return self._unknown()
        result, compute = self._dtypes[id(term)]
        named["dtype"] = result
        operands = [
            _cast(self.interval(a), a, compute) for a in term.args if not isinstance(a, _OPTIONS)
        ]
        found = rule(operands, named)
        if found is None:
            return self._unknown()
        low, high = found.low, found.high
        if result is torch.bool:
            low, high = low.clamp(0, 1), high.clamp(0, 1)
        elif result.is_floating_point:
            low, high = _rounded(low, result), _rounded(high, result)
            if rule not in (_where, _masked_fill):  # what may be NaN makes NaN
                unknown = functools.reduce(torch.logical_or, map(_is_unknown, operands))
                low = torch.where(unknown, -math.inf, low)
                high = torch.where(unknown, math.inf, high)
        else:
            return _in_range(low, high, result)
        # inf - inf and 0 * inf say nothing.
        return _without_nan(low, high)

    def _number(self, value: Tensor) -> Interval:
        value = value.to(self._q.device).view(1, 1, 1, 1)
        return _without_nan(value, value)

    def _unknown(self) -> Interval:
        infinite = torch.full((1, 1, 1, 1), math.inf, dtype=torch.float64, device=self._q.device)
        return Interval(-infinite, infinite)

    def _leaf(self, index: int) -> Interval:
        return self._ends(rectangle(self._leaves[index], self._q, self._k))

    def _ends(self, x: Tensor) -> Interval:
        """Smallest and largest value of every block."""
        low = high = x
        for dim, block in zip((2, 3), self._blocks, strict=True):
            if x.shape[dim] > 1:
                low, high = (
                    _folded(low, dim, block).amin(dim + 1),
                    _folded(high, dim, block).amax(dim + 1),
                )
        return _without_nan(low.double(), high.double())


_OPTIONS = (torch.dtype, torch.device, torch.layout, torch.memory_format, str, type(None))


def _folded(x: Tensor, dim: int, block: int) -> Tensor:
    """Blocks along a dim as a dim of their own; the last one is filled up with its last value."""
    rest = -x.shape[dim] % block
    if rest:
        shape = list(x.shape)
        shape[dim] = rest
        x = torch.cat((x, x.narrow(dim, x.shape[dim] - 1, 1).expand(shape)), dim)
    return x.unflatten(dim, (-1, block))


def _is_unknown(x: Interval) -> Tensor:
    return (x.low == -math.inf) & (x.high == math.inf)


def _without_nan(low: Tensor, high: Tensor) -> Interval:
    nan = low.isnan() | high.isnan()
    return Interval(low.masked_fill(nan, -math.inf), high.masked_fill(nan, math.inf))


def _in_range(low: Tensor, high: Tensor, dtype: torch.dtype) -> Interval:
    """Integers outside of their dtype wrap around."""
    limits = torch.iinfo(dtype)
    wraps = (low < limits.min) | (high > limits.max)
    return _without_nan(low.masked_fill(wraps, -math.inf), high.masked_fill(wraps, math.inf))


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Kernels of half precision compute in fp32 and round once more.
    return x if dtype == torch.float64 else x.float().to(dtype).double()


def _cast(given: Interval, term: Any, compute: torch.dtype) -> Interval:
    """Operands in the dtype that an operation computes in. Rounding keeps the order."""
    if compute is torch.bool:
        return given
    if not compute.is_floating_point:
        return _in_range(given.low, given.high, compute)
    ends = [_rounded(x, compute) for x in (given.low, given.high)]
    if isinstance(term, Number | int | float) or compute.itemsize < 4:
        # Kernels differ in whether they round a scalar operand.
        ends += [x for end in (given.low, given.high) for x in (end, _rounded(end, torch.float32))]
    return Interval(torch.stack(ends).amin(0), torch.stack(ends).amax(0))


Rule = Callable[[list[Interval], Mapping[str, Any]], Interval | None]


def _binary(low_high: Callable[[Interval, Interval], tuple[Tensor, Tensor]]) -> Rule:
    def rule(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
        return Interval(*low_high(args[0], args[1])) if len(args) == 2 else None

    return rule


def _corners(f: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """For operations whose extremes over a box are at its corners."""

    def rule(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
        if len(args) != 2:
            return None
        a, b = args
        values = [f(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        low, high = values[0], values[0]
        for value in values[1:]:
            low, high = torch.minimum(low, value), torch.maximum(high, value)
        return Interval(low, high)

    return rule


def _truth(certain: Tensor, possible: Tensor) -> Interval:
    return Interval(certain.double(), possible.double())


def _compare(
    always: Callable[[Interval, Interval], Tensor], ever: Callable[[Interval, Interval], Tensor]
) -> Rule:
    def rule(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
        return _truth(always(*args[:2]), ever(*args[:2])) if len(args) >= 2 else None

    return rule


def _sure(x: Interval) -> Tensor:
    return (x.low > 0) | (x.high < 0)


def _possible(x: Interval) -> Tensor:
    return (x.low != 0) | (x.high != 0)


def _at_most(a: Interval, b: Interval) -> Tensor:
    """Surely a <= b; unknown values may be NaN."""
    return (a.high <= b.low) & ~_is_unknown(a) & ~_is_unknown(b)


def _differ(a: Interval, b: Interval) -> Tensor:
    """Surely one is zero and the other not."""
    return (_sure(a) & ~_possible(b)) | (_sure(b) & ~_possible(a))


def _alike(a: Interval, b: Interval) -> Tensor:
    """Surely both are zero, or neither is."""
    return (_sure(a) & _sure(b)) | ~(_possible(a) | _possible(b))


def _equal(a: Interval, b: Interval) -> tuple[Tensor, Tensor]:
    """(surely equal, possibly equal)"""
    one = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return one, (a.low <= b.high) & (b.low <= a.high)


def _same(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
    a, dtype = args[0], named["dtype"]
    if dtype is torch.bool:
        return _truth(_sure(a), _possible(a))
    return a if dtype.is_floating_point else Interval(a.low.trunc(), a.high.trunc())


def _where(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
    if len(args) != 3:
        return None
    condition, yes, no = args
    sure, possible = _sure(condition), _possible(condition)
    low = torch.where(sure, yes.low, torch.where(possible, torch.minimum(yes.low, no.low), no.low))
    high = torch.where(
        sure, yes.high, torch.where(possible, torch.maximum(yes.high, no.high), no.high)
    )
    return Interval(low, high)


def _masked_fill(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
    return _where([args[1], args[2], args[0]], named) if len(args) == 3 else None


def _not(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
    return _truth(~_possible(args[0]), ~_sure(args[0]))


def _abs(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
    a = args[0]
    high = torch.maximum(a.low.abs(), a.high.abs())
    low = torch.where(_sure(a), torch.minimum(a.low.abs(), a.high.abs()), torch.zeros_like(high))
    return Interval(low, high)


def _divide(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
    dtype, mode = named["dtype"], named.get("rounding_mode")
    if len(args) != 2 or not bool((args[1].low > 0).all()):
        return None
    if mode == "floor" and not dtype.is_floating_point:
        return _corners(lambda x, y: torch.floor(x / y))(args, named)
    found = _corners(torch.div)(args, named) if mode is None else None
    if found is None:
        return None
    # Some kernels multiply by the reciprocal.
    slack = 2 * torch.finfo(dtype).eps
    return Interval(found.low - slack * found.low.abs(), found.high + slack * found.high.abs())


def _floor_divide(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
    return _divide(args, {**named, "rounding_mode": "floor"})


_RULES: dict[str, Rule] = {
    "add": _binary(lambda a, b: (a.low + b.low, a.high + b.high)),
    "sub": _binary(lambda a, b: (a.low - b.high, a.high - b.low)),
    "rsub": _binary(lambda a, b: (b.low - a.high, b.high - a.low)),
    "mul": _corners(torch.mul),
    "neg": lambda args, named: Interval(-args[0].high, -args[0].low),
    "abs": _abs,
    "div": _divide,
    "floor_divide": _floor_divide,
    "minimum": _corners(torch.minimum),
    "maximum": _corners(torch.maximum),
    "lt": _compare(lambda a, b: a.high < b.low, lambda a, b: a.low < b.high),
    "le": _compare(_at_most, lambda a, b: a.low <= b.high),
    "gt": _compare(lambda a, b: a.low > b.high, lambda a, b: a.high > b.low),
    "ge": _compare(lambda a, b: _at_most(b, a), lambda a, b: a.high >= b.low),
    "eq": _compare(lambda a, b: _equal(a, b)[0], lambda a, b: _equal(a, b)[1]),
    "ne": _compare(lambda a, b: ~_equal(a, b)[1], lambda a, b: ~_equal(a, b)[0]),
    **dict.fromkeys(
        ("and", "logical_and", "bitwise_and"),
        _compare(lambda a, b: _sure(a) & _sure(b), lambda a, b: _possible(a) & _possible(b)),
    ),
    **dict.fromkeys(
        ("or", "logical_or", "bitwise_or"),
        _compare(lambda a, b: _sure(a) | _sure(b), lambda a, b: _possible(a) | _possible(b)),
    ),
    **dict.fromkeys(("not", "logical_not", "bitwise_not"), _not),
    "where": _where,
    "masked_fill": _masked_fill,
    **dict.fromkeys(("to", "clone", "contiguous", "detach", "alias"), _same),
    **dict.fromkeys(("reshape", "expand", "view"), _same),
    **dict.fromkeys(
        ("xor", "logical_xor", "bitwise_xor"),
        _compare(_differ, lambda a, b: ~_alike(a, b)),
    ),
}

_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
