"""Tiles: rectangles of (query, key) pairs that kernels compute, and how neighbours are joined.

A tile is in local offsets: the place of a token in the concatenation of the ranges it came from.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace


class Tile(enum.Enum):
    """How much of a rectangle is visible."""

    EMPTY = "empty"
    FULL = "full"
    CAUSAL = "causal"
    """Square; local query a sees exactly the local keys b <= a (a kernel's ``is_causal``)."""
    ANTICAUSAL = "anticausal"
    """Square; local query a sees exactly the local keys b >= a, as causal seen from the end."""
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
        triangle = self.kind in (Tile.CAUSAL, Tile.ANTICAUSAL)
        return rows * (rows + 1) // 2 if triangle else rows * columns

    def moved(self, q: int, k: int) -> TileTask:
        """The same tile, q queries and k keys further."""
        return TileTask(
            self.q_start + q, self.q_stop + q, self.k_start + k, self.k_stop + k, self.kind
        )


def joined(tasks: Sequence[TileTask]) -> tuple[TileTask, ...]:
    """Causal squares that touch with the full tile between them as one square, and full tiles
    that share an edge as one; ordered by query, then key."""
    found = _join(_join(_join_causal(list(tasks)), rows=True), rows=False)
    return tuple(sorted(found, key=lambda t: (t.q_start, t.k_start)))


def _join_causal(tasks: Sequence[TileTask]) -> list[TileTask]:
    """Join causal squares on one diagonal whose lower left corner is a full tile."""
    pending = dict.fromkeys(tasks)
    squares = {(t.q_start, t.k_start): t for t in tasks if t.kind is Tile.CAUSAL}
    found: list[TileTask] = []
    for start in sorted(squares):
        square = squares[start]
        if square not in pending:
            continue
        del pending[square]
        while (last := squares.get((square.q_stop, square.k_stop))) is not None:
            corner = TileTask(last.q_start, last.q_stop, square.k_start, square.k_stop, Tile.FULL)
            if corner not in pending:
                break
            del pending[corner], pending[last]
            square = TileTask(square.q_start, last.q_stop, square.k_start, last.k_stop, last.kind)
        found.append(square)
    return [*found, *pending]


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
