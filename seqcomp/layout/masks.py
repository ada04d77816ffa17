"""Attention masks as rules on positions, and the tiles that a pair of token sets needs.

Positions are global. ``tiles`` cuts what a mask allows into rectangles that fast kernels
understand; what no kernel understands stays a PARTIAL rectangle whose own small mask is evaluated
from the positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from seqcomp.layout.bands import PLAIN, BandCut, Limits, keys_in_band, split_band
from seqcomp.layout.tiles import Tile, TileTask, joined

__all__ = [
    "Band", "Causal", "Full", "Mask", "Tile", "TileTask", "classify", "joined", "tiles",
]  # fmt: skip


class Mask(ABC):
    """A rule on global positions that says which keys a query sees."""

    @abstractmethod
    def visible(self, q: Any, k: Any) -> Any:
        """Whether the query at position q sees the key at k; ints, or arrays that broadcast."""

    @abstractmethod
    def split(self, q: range, k: range, cut: BandCut = PLAIN) -> list[TileTask]:
        """Disjoint tasks that cover exactly the visible pairs of two ascending ranges.

        cut: of the bands in it.
        """

    def keys_seen(self, q: range, k: range) -> range:
        """Local keys from the first to the last that some query in q sees."""
        tasks = self.split(q, k)
        if not tasks:
            return range(0)
        return range(min(t.k_start for t in tasks), max(t.k_stop for t in tasks))

    @property
    def limits(self) -> Limits | None:
        """The band that the mask is; None where it is none."""
        return None


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def visible(self, q: Any, k: Any) -> Any:
        return (q >= 0) & (k >= 0)

    def split(self, q: range, k: range, cut: BandCut = PLAIN) -> list[TileTask]:
        return [TileTask(0, len(q), 0, len(k), Tile.FULL)] if len(q) and len(k) else []


class _Banded(Mask):
    @property
    @abstractmethod
    def limits(self) -> Limits: ...

    def split(self, q: range, k: range, cut: BandCut = PLAIN) -> list[TileTask]:
        return split_band(self.limits, q, k, cut)

    def keys_seen(self, q: range, k: range) -> range:
        return keys_in_band(self.limits, q, k)


@dataclass(frozen=True)
class Causal(_Banded):
    """The query at global position i sees the keys j <= i + offset."""

    offset: int = 0

    @property
    def limits(self) -> Limits:
        return Limits(low=-self.offset)

    def visible(self, q: Any, k: Any) -> Any:
        return k <= q + self.offset


@dataclass(frozen=True)
class Band(_Banded):
    """The query at i sees the keys j with low <= i - j <= high; low None is no limit.

    A causal window of w tokens, the query's own included, is ``Band(0, w - 1)``.
    """

    low: int | None
    high: int

    @property
    def limits(self) -> Limits:
        return Limits(self.low, self.high)

    def visible(self, q: Any, k: Any) -> Any:
        near = q - k <= self.high
        return near if self.low is None else near & (q - k >= self.low)


def classify(mask: Mask, q: range, k: range) -> Tile:
    """What one rectangle of ascending ranges is under ``mask``."""
    tasks = tiles(mask, (q,), (k,))
    if not tasks:
        return Tile.EMPTY
    whole = len(tasks) == 1 and replace(tasks[0], kind=Tile.FULL) == TileTask(
        0, len(q), 0, len(k), Tile.FULL
    )
    return tasks[0].kind if whole else Tile.PARTIAL


def tiles(
    mask: Mask, q_ranges: Sequence[range], k_ranges: Sequence[range], cut: BandCut = PLAIN
) -> tuple[TileTask, ...]:
    """The kernel calls for all queries in ``q_ranges`` against all keys in ``k_ranges``.

    Together they cover exactly the visible pairs (PARTIAL ones a superset that their own mask
    trims), each once; empty ones are left out and neighbours are joined. Offsets count over the
    concatenation of the ranges. Ordered by query, then key.
    """
    tasks: list[TileTask] = []
    q_offset = 0
    for q in q_ranges:
        k_offset = 0
        for k in k_ranges:
            tasks += [task.moved(q_offset, k_offset) for task in mask.split(q, k, cut)]
            k_offset += len(k)
        q_offset += len(q)
    return joined(tasks)
