"""Bands: exact tiles of bounded number, areas in closed form, the keys that are seen."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqcomp.layout.bands import SMALLEST_EDGE, BandCut, Limits, band_area, keys_in_band, split_band
from seqcomp.layout.intervals import visible_area, work
from seqcomp.layout.masks import Band, Causal, Tile, tiles
from seqcomp.layout.sequence import SequenceLayout
from tests.unit.layout.test_layout import ascending_ranges, covered, layouts

STRIPS = BandCut(rows=3, widest=9)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    low = draw(st.none() | st.integers(-12, 12))
    high = draw(st.none() | st.integers(-12, 12))
    return Limits(low, high)


def seen(found: Limits, q: int, k: int) -> bool:
    above = found.low is None or q - k >= found.low
    return above and (found.high is None or q - k <= found.high)


@settings(max_examples=500)
@given(
    limits(),
    ascending_ranges(),
    ascending_ranges(),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([BandCut(), BandCut(2), BandCut(5), STRIPS]),
)
def test_any_two_ranges(band: Limits, q: range, k: range, edge: int, cut: BandCut) -> None:
    """Whatever the rows of a tile: the tiles, the number of pairs and the keys are those of all
    pairs tried one by one."""
    pairs = [(a, b) for a in range(len(q)) for b in range(len(k)) if seen(band, q[a], k[b])]
    tasks = split_band(band, q, k, cut, smallest=edge)

    class Rule(Band):
        def visible(self, i: int, j: int) -> bool:
            return seen(band, i, j)

    assert sorted(covered(Rule(0, 0), tuple(tasks), list(q), list(k))) == pairs
    assert band_area(band, q, k) == len(pairs)
    keys = keys_in_band(band, q, k)
    for task in tasks:
        assert task.area
        assert task.k_start in keys
        assert task.k_stop - 1 in keys
    if q.step == k.step:
        assert list(keys) == sorted({b for _, b in pairs})
        partial = [t for t in tasks if t.kind is Tile.PARTIAL]
        assert band.high is not None or not partial, "a causal mask has no partial tiles"
    elif pairs:
        assert {b for _, b in pairs} <= set(keys)


@given(layouts(), st.integers(-6, 6) | st.none(), st.integers(-6, 40))
def test_all_ring_ranks_cover_the_square_once(case, low: int | None, high: int) -> None:
    layout, length = case
    mask = Band(low, high)
    total = 0
    for i, j in itertools.product(range(layout.ring), repeat=2):
        q_ranges, k_ranges = layout.ring_ranges(length, i), layout.ring_ranges(length, j)
        q, k = ([p for part in ranges for p in part] for ranges in (q_ranges, k_ranges))
        wanted = [(a, b) for a in range(len(q)) for b in range(len(k)) if mask.visible(q[a], k[b])]
        found = covered(mask, tiles(mask, q_ranges, k_ranges), q, k)
        assert sorted(found) == wanted
        assert visible_area(mask, q_ranges, k_ranges) == len(wanted)
        total += len(wanted)
    assert sum(work(mask, layout, length)) == total


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("window", [1, 100, 128, 500, 4096])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_few_tiles_that_waste_nothing(kind: str, window: int, parts: int) -> None:
    """O(length / rows) tiles; only a band narrower than a tile computes more than what is seen."""
    layout, length, mask = SequenceLayout(kind, 4), 1 << 15, Band(0, window - 1)
    computed = visible = 0
    for i, j in itertools.product(range(4), repeat=2):
        q, k = layout.ring_ranges(length, i), layout.ring_ranges(length, j)
        tasks = tiles(mask, q, k, BandCut(parts))
        local = window // 4 if kind == "striped" else window
        assert len(tasks) <= 3 * (length // 4 // max(SMALLEST_EDGE, local // parts) + 4)
        masked = [t.area for t in tasks if t.kind is Tile.PARTIAL]
        assert max(masked, default=0) <= 2 * SMALLEST_EDGE**2
        computed += sum(t.area for t in tasks)
        visible += visible_area(mask, q, k)
    assert visible == window * (window + 1) // 2 + (length - window) * window
    if window >= SMALLEST_EDGE * (4 if kind == "striped" else 1):
        assert computed == visible


@pytest.mark.parametrize("window", [64, 300, 1024])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_a_narrow_band_is_few_tiles(kind: str, window: int) -> None:
    """Of so many rows and no more keys than they see."""
    layout, length, mask = SequenceLayout(kind, 4), 1 << 13, Band(0, window - 1)
    for i, j in itertools.product(range(4), repeat=2):
        q, k = layout.ring_ranges(length, i), layout.ring_ranges(length, j)
        tasks = tiles(mask, q, k, BandCut(rows=256, widest=1024))
        assert len(tasks) <= length // 4 // 256 + 4
        for task in tasks:
            if task.kind is not Tile.PARTIAL:
                continue
            assert task.q_stop - task.q_start <= 256
            assert task.k_stop - task.k_start < 256 + window


def test_a_window_wider_than_the_sequence_is_causal() -> None:
    q, k = range(64, 128), range(64)
    assert tiles(Band(0, 127), (q,), (k,)) == tiles(Causal(), (q,), (k,))
    assert tiles(Band(0, 127), (q,), (q,)) == tiles(Causal(), (q,), (q,))
    assert tiles(Band(0, 127), (q,), (q,), BandCut(rows=64, widest=128)) == tiles(
        Causal(), (q,), (q,)
    )


def test_a_million_tokens_need_no_loop_over_tokens() -> None:
    layout, s = SequenceLayout("contiguous", 64), 1 << 30
    mask = Band(0, (1 << 24) - 1)
    assert sum(work(mask, layout, s)) == (1 << 23) * ((1 << 24) + 1) + (s - (1 << 24)) * (1 << 24)
