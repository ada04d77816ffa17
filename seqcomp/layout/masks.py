"""Attention masks as descriptions, and the tiles that a pair of token sets needs.

Positions are global. A tile is a rectangle of (query, key) pairs in local offsets: the place of
a token in the concatenation of the ranges it came from. ``tiles`` cuts what a mask allows into
rectangles that fast kernels understand; what no kernel understands stays a PARTIAL rectangle
whose own small mask is evaluated from the positions.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


class Tile(enum.Enum):
    """How much of a rectangle is visible."""

    EMPTY = "empty"
    FULL = "full"
    CAUSAL = "causal"
    """Square; local query a sees exactly the local keys b <= a (a kernel's ``is_causal``)."""
    PARTIAL = "partial"


@dataclass(frozen=True)
class TileTask:
    """One kernel call: local queries [q_start, q_stop) against local keys [k_start, k_stop)."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: Tile

    @property
    def area(self) -> int:
        """Pairs that a kernel computes; a PARTIAL tile computes its whole rectangle."""
        rows, columns = self.q_stop - self.q_start, self.k_stop - self.k_start
        return rows * (rows + 1) // 2 if self.kind is Tile.CAUSAL else rows * columns


class Mask(ABC):
    """A rule on global positions that says which keys a query sees."""

    @abstractmethod
    def visible(self, q: Any, k: Any) -> Any:
        """Whether the query at position q sees the key at k; ints, or arrays that broadcast."""

    @abstractmethod
    def split(self, q: range, k: range) -> list[TileTask]:
        """Disjoint tasks that cover exactly the visible pairs of two ascending ranges."""


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def visible(self, q: Any, k: Any) -> Any:
        return (q >= 0) & (k >= 0)

    def split(self, q: range, k: range) -> list[TileTask]:
        return [TileTask(0, len(q), 0, len(k), Tile.FULL)] if len(q) and len(k) else []


@dataclass(frozen=True)
class Causal(Mask):
    """The query at global position i sees the keys j <= i + offset."""

    offset: int = 0

    def visible(self, q: Any, k: Any) -> Any:
        return k <= q + self.offset

    def split(self, q: range, k: range) -> list[TileTask]:
        if not len(q) or not len(k):
            return []
        if q.step != k.step:
            return self._split_unequal(q, k)
        # Local query a sees the local keys b <= a + shift.
        shift = (q.start + self.offset - k.start) // q.step
        if shift >= len(k) - 1:
            return [TileTask(0, len(q), 0, len(k), Tile.FULL)]
        low = min(max(0, -shift), len(q))
        high = max(low, min(len(q), len(k) - shift))
        corners = (
            (low, high, 0, low + shift, Tile.FULL),
            (low, high, low + shift, high + shift, Tile.CAUSAL),
            (high, len(q), 0, len(k), Tile.FULL),
        )
        tasks = [TileTask(*c) for c in corners if c[0] < c[1] and c[2] < c[3]]
        return [_as_full_if_single(task) for task in tasks]

    def _split_unequal(self, q: range, k: range) -> list[TileTask]:
        first = _count_up_to(k, q[0] + self.offset)
        last = _count_up_to(k, q[-1] + self.offset)
        if first == len(k):
            return [TileTask(0, len(q), 0, len(k), Tile.FULL)]
        rows = 0 if first else len(q) - _count_from(q, k[0] - self.offset)
        return [TileTask(rows, len(q), 0, last, Tile.PARTIAL)] if last else []


def classify(mask: Mask, q: range, k: range) -> Tile:
    """What one rectangle of ascending ranges is under ``mask``."""
    tasks = tiles(mask, (q,), (k,))
    if not tasks:
        return Tile.EMPTY
    whole = len(tasks) == 1 and replace(tasks[0], kind=Tile.FULL) == TileTask(
        0, len(q), 0, len(k), Tile.FULL
    )
    return tasks[0].kind if whole else Tile.PARTIAL


def tiles(mask: Mask, q_ranges: Sequence[range], k_ranges: Sequence[range]) -> tuple[TileTask, ...]:
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
            tasks += [_moved(task, q_offset, k_offset) for task in mask.split(q, k)]
            k_offset += len(k)
        q_offset += len(q)
    return joined(tasks)


def joined(tasks: Sequence[TileTask]) -> tuple[TileTask, ...]:
    """Causal squares that touch with the full tile between them as one square, and full tiles
    that share an edge as one; ordered by query, then key."""
    found = _join(_join(_join_causal(list(tasks)), rows=True), rows=False)
    return tuple(sorted(found, key=lambda t: (t.q_start, t.k_start)))


def _moved(task: TileTask, q: int, k: int) -> TileTask:
    return TileTask(task.q_start + q, task.q_stop + q, task.k_start + k, task.k_stop + k, task.kind)


def _as_full_if_single(task: TileTask) -> TileTask:
    single = task.q_stop - task.q_start == 1
    return replace(task, kind=Tile.FULL) if single else task


def _join_causal(tasks: list[TileTask]) -> list[TileTask]:
    """Join causal squares on one diagonal whose lower left corner is a full tile."""
    pending = set(tasks)
    joined: list[TileTask] = []
    for task in sorted(tasks, key=lambda t: (t.q_start, t.k_start)):
        if task not in pending or task.kind is not Tile.CAUSAL:
            continue
        pending.discard(task)
        square = task
        while (found := _next_square(square, pending)) is not None:
            corner, last = found
            pending -= {corner, last}
            square = TileTask(square.q_start, last.q_stop, square.k_start, last.k_stop, last.kind)
        joined.append(square)
    return joined + [task for task in tasks if task in pending]


def _next_square(square: TileTask, pending: set[TileTask]) -> tuple[TileTask, TileTask] | None:
    for last in pending:
        if last.kind is Tile.CAUSAL and (last.q_start, last.k_start) == (
            square.q_stop,
            square.k_stop,
        ):
            corner = TileTask(last.q_start, last.q_stop, square.k_start, square.k_stop, Tile.FULL)
            return (corner, last) if corner in pending else None
    return None


def _join(tasks: Sequence[TileTask], *, rows: bool) -> list[TileTask]:
    """Join full tiles that share an edge, along the queries (rows) or along the keys."""

    def edge(t: TileTask) -> tuple[int, int, int]:
        same = (t.k_start, t.k_stop) if rows else (t.q_start, t.q_stop)
        return (*same, t.q_start if rows else t.k_start)

    joined = [task for task in tasks if task.kind is not Tile.FULL]
    last: TileTask | None = None
    for task in sorted((t for t in tasks if t.kind is Tile.FULL), key=edge):
        if last is not None and edge(last)[:2] == edge(task)[:2]:
            if rows and last.q_stop == task.q_start:
                last = replace(last, q_stop=task.q_stop)
                continue
            if not rows and last.k_stop == task.k_start:
                last = replace(last, k_stop=task.k_stop)
                continue
        if last is not None:
            joined.append(last)
        last = task
    return joined if last is None else [*joined, last]


def _count_up_to(positions: range, limit: int) -> int:
    return min(len(positions), max(0, (limit - positions.start) // positions.step + 1))


def _count_from(positions: range, limit: int) -> int:
    return len(positions) - _count_up_to(positions, limit - 1)
