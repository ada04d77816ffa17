"""Triangles cut into smaller ones and the full squares between them.

A kernel that skips unseen keys block by block computes a triangle of few blocks as a square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seqcomp.layout.tiles import Tile, TileTask

TRIANGLES = (Tile.CAUSAL, Tile.ANTICAUSAL)


@dataclass(frozen=True)
class Grain:
    """Triangles of more than `smallest` rows are cut, at multiples of it; those of more than
    `largest` are whole blocks but for a small part of them, and stay as they are."""

    smallest: int
    largest: int


def cut(tasks: Sequence[TileTask], grain: Grain) -> tuple[TileTask, ...]:
    """Tasks that cover the same pairs, each once."""
    return tuple(part for task in tasks for part in _cut(task, grain))


def _cut(task: TileTask, grain: Grain) -> list[TileTask]:
    rows = task.q_stop - task.q_start
    if task.kind not in TRIANGLES or not grain.smallest < rows <= grain.largest:
        return [task]
    half = -(-rows // (2 * grain.smallest)) * grain.smallest
    q, k = task.q_start + half, task.k_start + half
    first = TileTask(task.q_start, q, task.k_start, k, task.kind)
    last = TileTask(q, task.q_stop, k, task.k_stop, task.kind)
    if task.kind is Tile.CAUSAL:
        between = TileTask(q, task.q_stop, task.k_start, k, Tile.FULL)
    else:
        between = TileTask(task.q_start, q, k, task.k_stop, Tile.FULL)
    return [*_cut(first, grain), between, *_cut(last, grain)]
