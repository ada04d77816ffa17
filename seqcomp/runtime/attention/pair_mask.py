"""A mask or score bias as a program on pairs (query, key), from vectors of length S.

Masks of real models are S x S only in name: comparisons of positions, document numbers and
padding flags, each a vector over the queries or over the keys. Such a program is evaluated for
any rectangle of pairs, exactly; `pair_bounds` bounds it on a whole grid of blocks at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Leaf:
    """The index-th input: [b, h, q, k], each dim whole or of size 1.

    scalar: it has no dims in the graph, which matters to how dtypes are promoted.
    """

    index: int
    scalar: bool = False


@dataclass(frozen=True)
class Position:
    """Global positions of the queries or of the keys."""

    of: Literal["query", "key"]


@dataclass(frozen=True)
class Score:
    """The scaled score of a pair, in accumulator dtype."""


@dataclass(frozen=True)
class Number:
    """A constant of one dtype; `scalar` as for a leaf."""

    value: float | int | bool
    dtype: torch.dtype
    scalar: bool = False


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


Term = Leaf | Position | Score | Number | Apply | Lookup


@dataclass(frozen=True)
class PairMask:
    """A whole mask. Boolean: True where seen. Additive: added to the scores.

    hidden: values of an additive mask at or below it hide a pair. Where it is finite, a row that
    hides every key is the mean of all values, not 0, and must be computed with its numbers.
    mod: what takes the place of the score of a pair that is seen; then the mask is boolean.
    filled: the pairs (boolean) whose number of an additive mask takes the place of the score.
    sinks: something else is in every softmax, so that a row that hides every key is 0 all the same.
    """

    term: Term
    additive: bool = False
    hidden: float = -math.inf
    trained: tuple[int, ...] = ()  # leaves that may need gradients
    tables: tuple[int, ...] = ()  # leaves [rows, h, 1, 1] that are looked up
    mod: Term | None = None
    filled: Term | None = None
    sinks: bool = False

    def evaluate(self, leaves: Sequence[Tensor], q: Tensor, k: Tensor) -> Tensor:
        """The mask on the pairs q x k of global positions: broadcastable to [B, H, q, k]."""
        return self._on(self.term, leaves, q, k)

    def fills(self, leaves: Sequence[Tensor], q: Tensor, k: Tensor) -> Tensor | None:
        """`filled` on the pairs q x k, as in `evaluate`."""
        return None if self.filled is None else self._on(self.filled, leaves, q, k)

    @staticmethod
    def _on(term: Term, leaves: Sequence[Tensor], q: Tensor, k: Tensor) -> Tensor:
        parts = [rectangle(leaf, q, k) for leaf in leaves]
        return run(term, parts, q.view(1, 1, -1, 1), k.view(1, 1, 1, -1))

    def modified(self, scores: Tensor, leaves: Sequence[Tensor], q: Tensor, k: Tensor) -> Tensor:
        """What `mod` makes of the scores [B, H, q, k] of a rectangle, seen or not."""
        assert self.mod is not None
        parts = [rectangle(leaf, q, k) for leaf in leaves]
        return run(self.mod, parts, q.view(1, 1, -1, 1), k.view(1, 1, 1, -1), scores=scores)

    def diagonal(self, leaves: Sequence[Tensor], q: Tensor) -> Tensor:
        """The mask on the pairs (q[i], q[i]): broadcastable to [B, H, q]."""
        parts = []
        for leaf in leaves:
            if leaf.shape[2] > 1 and leaf.shape[3] > 1:
                parts.append(leaf[:, :, q, q].unsqueeze(3))
            else:
                parts.append(rectangle(leaf.mT if leaf.shape[3] > 1 else leaf, q, q))
        return run(self.term, parts, q.view(1, 1, -1, 1), q.view(1, 1, -1, 1)).squeeze(-1)


def hides_from(dtype: torch.dtype) -> float:
    """What is added to a score of this dtype hides a pair from this value on down.

    The scores of a model are below 1e7; against a key that is seen, exp() of the rest is 0.
    """
    return max(torch.finfo(dtype).min / 2, -1e8) if dtype.is_floating_point else -1e8


def rectangle(leaf: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The part of an input that belongs to the pairs q x k."""
    if leaf.shape[2] > 1:
        leaf = leaf.index_select(2, q)
    return leaf.index_select(3, k) if leaf.shape[3] > 1 else leaf


def run(
    term: Term,
    leaves: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    seen: Callable[[Apply, Tensor, list[Any]], None] | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    """The program on tensors that broadcast; `seen` is told each operation, result and operands."""
    known: dict[int, Tensor] = {}

    def value(item: Any) -> Any:
        match item:
            case Leaf(index, scalar):
                return leaves[index].reshape(()) if scalar else leaves[index]
            case Position(of):
                return q if of == "query" else k
            case Score():
                return scores
            case Number(number, dtype, scalar):
                shape = () if scalar else (1, 1, 1, 1)
                return torch.full(shape, number, dtype=dtype, device=q.device)
            case Apply(target, args, kwargs):
                if id(item) not in known:
                    given = [value(a) for a in args]
                    known[id(item)] = target(*given, **{name: value(a) for name, a in kwargs})
                    if seen is not None:
                        seen(item, known[id(item)], given)
                return known[id(item)]
            case Lookup(table, index):
                rows = value(index)
                shape = torch.broadcast_shapes(rows.shape, (1, 1, q.shape[2], k.shape[3]))
                return leaves[table][:, :, 0, 0][rows.expand(shape)[:, 0]].permute(0, 3, 1, 2)
            case tuple() | list():
                return [value(a) for a in item]
        return item

    found = value(term)
    assert isinstance(found, Tensor)
    return found if found.ndim == 4 else found.reshape(1, 1, 1, 1)
