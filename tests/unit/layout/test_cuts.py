"""Triangles cut into smaller ones: the same pairs, in tiles that a kernel does not waste."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from seqcomp.layout.cuts import TRIANGLES, Grain, cut
from seqcomp.layout.tiles import Tile, TileTask


def pairs(task: TileTask) -> list[tuple[int, int]]:
    return [
        (a, b)
        for a in range(task.q_start, task.q_stop)
        for b in range(task.k_start, task.k_stop)
        if task.kind is Tile.FULL
        or (b - task.k_start <= a - task.q_start) is (task.kind is Tile.CAUSAL)
        or b - task.k_start == a - task.q_start
    ]


@given(st.sampled_from(TRIANGLES), st.integers(1, 40), st.integers(1, 9), st.integers(0, 60))
def test_the_same_pairs_each_once(kind: Tile, rows: int, smallest: int, largest: int) -> None:
    task = TileTask(3, 3 + rows, 100, 100 + rows, kind)
    found = cut([task], Grain(smallest, largest))
    assert Counter(p for part in found for p in pairs(part)) == Counter(pairs(task))
    if smallest < rows <= largest:
        assert all(t.q_stop - t.q_start <= smallest for t in found if t.kind in TRIANGLES)
        assert all((t.q_start - 3) % smallest == 0 for t in found)
    else:
        assert found == (task,)


def test_other_tiles_stay() -> None:
    tasks = [TileTask(0, 64, 0, 64, kind) for kind in (Tile.FULL, Tile.PARTIAL)]
    assert cut(tasks, Grain(8, 64)) == tuple(tasks)
