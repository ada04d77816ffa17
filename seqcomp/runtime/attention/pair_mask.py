"""A mask or score bias as a program on pairs (query, key), from vectors of length S.

Masks of real models are S x S only in name: comparisons of positions, document numbers and
padding flags, each a vector over the queries or over the keys. Such a program is evaluated for
any rectangle of pairs, exactly, or for a whole grid of blocks at once by interval arithmetic,
which says for each block whether all, none or some of its pairs are visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Leaf:
    """The index-th input: [b, h, q, k], each dim whole or of size 1."""

    index: int


@dataclass(frozen=True)
class Position:
    """Global positions of the queries or of the keys."""

    of: Literal["query", "key"]


@dataclass(frozen=True)
class Number:
    """A constant of one dtype."""

    value: float | int | bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Apply:
    """An ATen operation that acts on each pair alone; `args` holds terms and literals."""

    target: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        schema = getattr(self.target, "_schema", None)
        return schema.name.removeprefix("aten::").strip("_") if schema else "unknown"


@dataclass(frozen=True)
class Lookup:
    """Rows of a table, chosen for each pair: a relative position bias.

    The table is a leaf [rows, h, 1, 1]; the index is a term without heads.
    """

    table: int
    index: Any


Term = Leaf | Position | Number | Apply | Lookup


@dataclass(frozen=True)
class PairMask:
    """A whole mask. Boolean: True where seen. Additive: added to the scores.

    hidden: values of an additive mask at or below it hide a pair. Where it is finite, a row that
    hides every key is the mean of all values, not 0, and must be computed with its numbers.
    """

    term: Term
    additive: bool = False
    hidden: float = -math.inf
    trained: tuple[int, ...] = ()  # leaves that may need gradients

    def evaluate(self, leaves: Sequence[Tensor], q: Tensor, k: Tensor) -> Tensor:
        """The mask on the pairs q x k of global positions: broadcastable to [B, H, q, k]."""
        parts = [_rectangle(leaf, q, k) for leaf in leaves]
        known: dict[int, Tensor] = {}
        return _exact(self.term, parts, q.view(1, 1, -1, 1), k.view(1, 1, 1, -1), known)


def _rectangle(leaf: Tensor, q: Tensor, k: Tensor) -> Tensor:
    if leaf.shape[2] > 1:
        leaf = leaf.index_select(2, q)
    return leaf.index_select(3, k) if leaf.shape[3] > 1 else leaf


def _exact(
    term: Any, leaves: Sequence[Tensor], q: Tensor, k: Tensor, known: dict[int, Tensor]
) -> Any:
    match term:
        case Leaf(index):
            return leaves[index]
        case Position(of):
            return q if of == "query" else k
        case Number(value, dtype):
            return torch.tensor(value, dtype=dtype, device=q.device)
        case Apply(target, args, kwargs):
            if id(term) not in known:
                given = [_exact(a, leaves, q, k, known) for a in args]
                named = {n: _exact(a, leaves, q, k, known) for n, a in kwargs}
                known[id(term)] = target(*given, **named)
            return known[id(term)]
        case Lookup(table, index):
            rows = _exact(index, leaves, q, k, known)
            shape = torch.broadcast_shapes(rows.shape, (1, 1, q.shape[2], k.shape[3]))
            return leaves[table][:, :, 0, 0][rows.expand(shape)[:, 0]].permute(0, 3, 1, 2)
        case tuple() | list():
            return [_exact(item, leaves, q, k, known) for item in term]
    return term


@dataclass(frozen=True)
class Interval:
    """Bounds of the values in each block of a grid [query blocks, key blocks], in fp64."""

    low: Tensor
    high: Tensor


def bounds(mask: PairMask, leaves: Sequence[Tensor], q: Tensor, k: Tensor, block: int) -> Interval:
    """Bounds of the mask on every block of `block` queries x `block` keys (the last may be
    smaller), over all samples and heads. Booleans count as 0 and 1.
    """
    grid = _Grid(leaves, q, k, block)
    found = grid.interval(mask.term)
    shape = (-(-len(q) // block), -(-len(k) // block))
    return Interval(found.low.expand(shape), found.high.expand(shape))


class _Grid:
    def __init__(self, leaves: Sequence[Tensor], q: Tensor, k: Tensor, block: int):
        self._leaves = leaves
        self._q = q
        self._k = k
        self._block = block
        self._known: dict[int, Interval] = {}

    def interval(self, term: Any) -> Interval:
        match term:
            case Leaf(index):
                return self._leaf(index)
            case Position(of):
                return self._position(self._q, 0) if of == "query" else self._position(self._k, 1)
            case Number(value, _) | (int() | float() | bool() as value):
                number = torch.tensor(float(value), dtype=torch.float64, device=self._q.device)
                return Interval(number, number)
            case Lookup(table, _):
                rows = self._leaves[table].double()
                return Interval(rows.min(), rows.max())
            case Apply():
                if id(term) not in self._known:
                    self._known[id(term)] = self._apply(term)
                return self._known[id(term)]
        return self._unknown()

    def _apply(self, term: Apply) -> Interval:
        rule = _RULES.get(term.name)
        if rule is None:
            return self._unknown()
        dtypes = [a for a in term.args if isinstance(a, torch.dtype)]
        named = dict(term.kwargs) | ({"dtype": dtypes[0]} if dtypes else {})
        if named.get("alpha", 1) != 1:
            return self._unknown()
        found = rule([self.interval(a) for a in term.args if _is_operand(a)], named)
        if found is None:
            return self._unknown()
        # inf - inf and 0 * inf say nothing.
        return Interval(
            found.low.nan_to_num(nan=-math.inf, neginf=-math.inf, posinf=math.inf),
            found.high.nan_to_num(nan=math.inf, neginf=-math.inf, posinf=math.inf),
        )

    def _unknown(self) -> Interval:
        infinite = torch.tensor(math.inf, dtype=torch.float64, device=self._q.device)
        return Interval(-infinite, infinite)

    def _position(self, positions: Tensor, dim: int) -> Interval:
        low, high = self._ends(positions.double()[None], 1)
        return Interval(*(x.movedim(0, -1) if dim == 0 else x for x in (low, high)))

    def _leaf(self, index: int) -> Interval:
        values = _rectangle(self._leaves[index], self._q, self._k).double()
        low, high = values.amin((0, 1)), values.amax((0, 1))
        for dim in (0, 1):
            if low.shape[dim] > 1:
                low, high = self._ends(low, dim)[0], self._ends(high, dim)[1]
        return Interval(low, high)

    def _ends(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Smallest and largest value of every block along a dim."""
        rest = -x.shape[dim] % self._block
        last = x.narrow(dim, x.shape[dim] - 1, 1)
        if rest:
            shape = list(x.shape)
            shape[dim] = rest
            x = torch.cat((x, last.expand(shape)), dim)
        blocks = x.unflatten(dim, (-1, self._block))
        return blocks.amin(dim + 1), blocks.amax(dim + 1)


def _is_operand(item: Any) -> bool:
    return (
        not isinstance(item, torch.dtype | torch.device | str | torch.layout) and item is not None
    )


Rule = Callable[[list[Interval], Mapping[str, Any]], Interval | None]


def _binary(low_high: Callable[[Interval, Interval], tuple[Tensor, Tensor]]) -> Rule:
    def rule(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
        return Interval(*low_high(args[0], args[1])) if len(args) >= 2 else None

    return rule


def _monotone(f: Callable[[Tensor], Tensor]) -> Rule:
    return lambda args, named: Interval(f(args[0].low), f(args[0].high))


def _corners(f: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """For operations whose extremes over a box are at its corners."""

    def rule(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
        if len(args) < 2:
            return None
        a, b = args[:2]
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


def _equal(a: Interval, b: Interval) -> tuple[Tensor, Tensor]:
    """(surely equal, possibly equal)"""
    one = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return one, (a.low <= b.high) & (b.low <= a.high)


def _same(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
    dtype = named.get("dtype")
    if dtype is torch.bool:
        return _truth(_sure(args[0]), _possible(args[0]))
    if dtype is None or dtype.is_floating_point:
        # Rounding keeps the order.
        ends = (args[0].low, args[0].high)
        return args[0] if dtype is None else Interval(*(x.to(dtype).double() for x in ends))
    finite = bool((args[0].low.isfinite() & args[0].high.isfinite()).all())
    return Interval(args[0].low.trunc(), args[0].high.trunc()) if finite else None


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


def _floor_divide(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
    if len(args) < 2 or named.get("rounding_mode", "floor") != "floor":
        return None
    if not bool((args[1].low > 0).all()):
        return None
    return _corners(lambda x, y: torch.floor(x / y))(args, named)


def _divide(args: list[Interval], named: Mapping[str, Any]) -> Interval | None:
    if named.get("rounding_mode") is not None:
        return _floor_divide(args, named)
    if len(args) < 2 or not bool((args[1].low > 0).all()):
        return None
    return _corners(torch.div)(args, named)


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
    "le": _compare(lambda a, b: a.high <= b.low, lambda a, b: a.low <= b.high),
    "gt": _compare(lambda a, b: a.low > b.high, lambda a, b: a.high > b.low),
    "ge": _compare(lambda a, b: a.low >= b.high, lambda a, b: a.high >= b.low),
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
    "exp": _monotone(torch.exp),
    "relu": _monotone(torch.relu),
}
