"""Tiles of a rank's own block in two parts of about equal work.

In the backward of a ring the keys of others arrive behind the first part, and the last gradients
go home behind the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from seqcomp.layout.cuts import TRIANGLES, Grain, cut
from seqcomp.layout.tiles import TileTask

SMALLEST_HALF = 128
"""Rows: two kernel calls for fewer take longer than what they hide."""

MOST = 2 / 3
"""Of all work: a tile with more is cut."""


@dataclass(frozen=True)
class Halves:
    """``last`` is empty where nothing is kept back."""

    first: tuple[TileTask, ...]
    last: tuple[TileTask, ...] = ()


def halves(
    tasks: Sequence[TileTask],
    refine: Callable[[tuple[TileTask, ...]], tuple[TileTask, ...]] = tuple,
) -> Halves:
    """Tasks that cover the same pairs, each once, in their order.

    refine: what becomes of tasks that were cut.
    """
    total = sum(task.area for task in tasks)
    parts: list[TileTask] = []
    for task in tasks:
        pieces = _cut(task) if task.area > MOST * total else (task,)
        parts += refine(pieces) if len(pieces) > 1 else pieces
    first, last = 0, 0
    kept: set[TileTask] = set()
    for task in sorted(parts, key=lambda t: t.area, reverse=True):
        if first <= last:
            first += task.area
        else:
            last += task.area
            kept.add(task)
    return Halves(
        tuple(task for task in parts if task not in kept),
        tuple(task for task in parts if task in kept),
    )


def _cut(task: TileTask) -> tuple[TileTask, ...]:
    rows = task.q_stop - task.q_start
    if rows < 2 * SMALLEST_HALF:
        return (task,)
    half = -(-rows // 2)
    if task.kind in TRIANGLES:
        return cut((task,), Grain(half, rows))
    between = task.q_start + half
    return replace(task, q_stop=between), replace(task, q_start=between)
