"""A rank's own tiles in two parts: the same pairs, about half of the work in each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqcomp.layout import halves as module
from seqcomp.layout.cuts import Grain, cut
from seqcomp.layout.halves import SMALLEST_HALF, halves
from seqcomp.layout.masks import Band, Causal, Full, Mask, Tile, TileTask, tiles
from seqcomp.layout.sequence import Layout, SequenceLayout

LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag", "striped")
RULES = (Causal(), Full(), Causal(3), Band(0, 9), Band(-4, 6), Band(None, 2), Band(2, 30))


def covered(tasks: tuple[TileTask, ...], rows: int) -> torch.Tensor:
    """How often each pair is computed."""
    found = torch.zeros(rows, rows, dtype=torch.int64)
    for t in tasks:
        part = torch.ones(t.q_stop - t.q_start, t.k_stop - t.k_start, dtype=torch.int64)
        part = {Tile.CAUSAL: part.tril(), Tile.ANTICAUSAL: part.triu()}.get(t.kind, part)
        found[t.q_start : t.q_stop, t.k_start : t.k_stop] += part
    return found


@given(
    st.sampled_from(RULES), st.sampled_from(LAYOUTS), st.integers(1, 4), st.integers(1, 12),
    st.integers(0, 3), st.sampled_from([1, 3, 128]), st.sampled_from([None, Grain(2, 9)]),
)  # fmt: skip
def test_the_same_pairs(
    rule: Mask, kind: Layout, ring: int, each: int, rank: int, smallest: int, grain: Grain | None
) -> None:
    own = SequenceLayout(kind, ring).ring_ranges(2 * each * ring, rank % ring)
    tasks = tiles(rule, own, own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SMALLEST_HALF", smallest)
        found = halves(tasks, (lambda t: cut(t, grain)) if grain else tuple)
    parts = (*found.first, *found.last)
    assert torch.equal(covered(parts, 2 * each), covered(tasks, 2 * each))
    areas = [sum(t.area for t in part) for part in (found.first, found.last)]
    assert abs(areas[0] - areas[1]) <= max((t.area for t in parts), default=0)
    if smallest == 1 and rule in (Causal(), Full()):
        assert min(areas) >= sum(areas) / 4
    if smallest == 128:
        assert set(parts) == set(tasks)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_causal_block_is_halved(kind: Layout) -> None:
    """Exactly, but for the diagonal: two triangles, and the square between them."""
    rows = 4 * SMALLEST_HALF
    own = SequenceLayout(kind, 4).ring_ranges(4 * rows, 1)
    found = halves(tiles(Causal(), own, own))
    assert [t.kind for t in found.first] == [Tile.FULL]
    assert [t.kind for t in found.last] == [Tile.CAUSAL] * 2
    assert sum(t.area for t in found.last) - found.first[0].area == rows // 2


def test_a_small_tile_stays_whole() -> None:
    task = TileTask(0, 2 * SMALLEST_HALF - 1, 0, 2 * SMALLEST_HALF - 1, Tile.CAUSAL)
    assert halves([task]) == module.Halves((task,))
    assert halves([]) == module.Halves(())
