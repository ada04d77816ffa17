"""Layouts are bijections that nest; tiles cover exactly what a mask allows; areas are exact."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqcomp.layout.intervals import causal_balance, visible_area, work
from seqcomp.layout.masks import Causal, Full, Mask, Tile, TileTask, classify, tiles
from seqcomp.layout.sequence import SequenceLayout, merge_adjacent, slice_ranges

KINDS = ("contiguous", "zigzag", "striped")
TRIANGLES = (Tile.CAUSAL, Tile.ANTICAUSAL)


@st.composite
def layouts(draw, max_chunks: int = 4):
    layout = SequenceLayout(
        draw(st.sampled_from(KINDS)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    )
    return layout, layout.factor * draw(st.integers(1, max_chunks))


@st.composite
def ascending_ranges(draw):
    start, step, count = draw(st.integers(0, 20)), draw(st.integers(1, 4)), draw(st.integers(0, 9))
    return range(start, start + step * count, step)


masks = st.one_of(st.just(Full()), st.builds(Causal, st.integers(-8, 8)))


def flat(ranges):
    return [position for part in ranges for position in part]


@given(layouts())
def test_permutation_is_a_bijection_with_its_inverse(case):
    layout, length = case
    permutation, inverse = layout.permutation(length), layout.inverse(length)
    assert sorted(permutation) == list(range(length))
    assert [permutation[i] for i in inverse] == list(range(length))
    assert (permutation == list(range(length))) or not layout.is_identity


@given(layouts())
def test_ranks_nest_in_ring_ranks(case):
    layout, length = case
    everyone = [layout.token_index(length, rank) for rank in range(layout.size)]
    assert {len(tokens) for tokens in everyone} == {length // layout.size}
    assert flat(everyone) == layout.permutation(length)
    for ring_rank in range(layout.ring):
        inner = everyone[ring_rank * layout.inner : (ring_rank + 1) * layout.inner]
        assert flat(layout.ring_ranges(length, ring_rank)) == flat(inner)


@given(layouts())
def test_ring_tokens_do_not_depend_on_the_inner_degree(case):
    layout, length = case
    alone = SequenceLayout(layout.kind, layout.ring)
    for ring_rank in range(layout.ring):
        assert layout.ring_ranges(length, ring_rank) == alone.ring_ranges(length, ring_rank)


def test_zigzag_and_striped_by_hand():
    zigzag = SequenceLayout("zigzag", 2, 2)
    assert [zigzag.token_index(16, rank) for rank in range(4)] == [
        [0, 1, 2, 3],
        [12, 13, 14, 15],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert zigzag.ring_ranges(16, 0) == (range(4), range(12, 16))
    assert zigzag.ring_ranges(16, 1) == (range(4, 12),)
    striped = SequenceLayout("striped", 2, 2)
    assert striped.ranges(8, 3) == (range(5, 8, 2),)
    assert striped.token_index(8, 3) == [5, 7]


@pytest.mark.parametrize(
    ("layout", "factor"),
    [
        (SequenceLayout("contiguous", 4, 3), 12),
        (SequenceLayout("striped", 4, 3), 12),
        (SequenceLayout("zigzag", 4, 3), 24),
        (SequenceLayout("zigzag", 4, 2), 8),
        (SequenceLayout("zigzag", 1, 1), 2),
    ],
)
def test_factor_and_nearest_legal_lengths(layout, factor):
    assert layout.factor == factor
    assert layout.nearest(5 * factor) == (5 * factor, 5 * factor)
    assert layout.nearest(5 * factor + 1) == (5 * factor, 6 * factor)
    assert layout.nearest(factor - 1) == (0, factor)
    for illegal in (0, -factor, factor + 1):
        with pytest.raises(ValueError, match=f"multiple of {factor}"):
            layout.token_index(illegal, 0)
    with pytest.raises(IndexError):
        layout.ranges(factor, layout.size)


@given(st.lists(ascending_ranges(), max_size=4), st.integers(0, 20), st.integers(0, 20))
def test_slices_and_merges_keep_the_elements(ranges, start, stop):
    assert flat(merge_adjacent(ranges)) == flat(ranges)
    assert flat(slice_ranges(ranges, start, stop)) == flat(ranges)[start:stop]


def covered(mask: Mask, tasks: tuple[TileTask, ...], q: list[int], k: list[int]):
    for task in tasks:
        for a, b in itertools.product(
            range(task.q_start, task.q_stop), range(task.k_start, task.k_stop)
        ):
            if task.kind is Tile.FULL:
                yield a, b
            elif task.kind is Tile.CAUSAL:
                if b - task.k_start <= a - task.q_start:
                    yield a, b
            elif task.kind is Tile.ANTICAUSAL:
                if b - task.k_start >= a - task.q_start:
                    yield a, b
            elif mask.visible(q[a], k[b]):
                yield a, b


def assert_exact_cover(mask, q_ranges, k_ranges):
    q, k = flat(q_ranges), flat(k_ranges)
    wanted = [(a, b) for a in range(len(q)) for b in range(len(k)) if mask.visible(q[a], k[b])]
    tasks = tiles(mask, q_ranges, k_ranges)
    assert sorted(covered(mask, tasks, q, k)) == wanted
    assert all(task.kind is not Tile.EMPTY and task.area for task in tasks)
    assert all(t.q_stop - t.q_start == t.k_stop - t.k_start for t in tasks if t.kind in TRIANGLES)
    assert visible_area(mask, q_ranges, k_ranges) == len(wanted)
    return tasks


@settings(max_examples=300)
@given(masks, ascending_ranges(), ascending_ranges())
def test_tiles_of_any_two_ranges_cover_the_visible_pairs_once(mask, q, k):
    tasks = assert_exact_cover(mask, (q,), (k,))
    kind = classify(mask, q, k)
    visible = [[mask.visible(i, j) for j in k] for i in q]
    if not any(map(any, visible)):
        assert kind is Tile.EMPTY
        assert tasks == ()
    elif all(map(all, visible)):
        assert kind is Tile.FULL
    elif visible == [[b <= a for b in range(len(q))] for a in range(len(q))] and q.step == k.step:
        assert kind is Tile.CAUSAL
    else:
        assert kind is Tile.PARTIAL


@given(layouts(), masks)
def test_tiles_of_all_ring_ranks_cover_the_square_once(case, mask):
    layout, length = case
    for i, j in itertools.product(range(layout.ring), repeat=2):
        tasks = assert_exact_cover(
            mask, layout.ring_ranges(length, i), layout.ring_ranges(length, j)
        )
        assert all(task.kind is not Tile.PARTIAL for task in tasks)


@pytest.mark.parametrize("ring", [2, 3, 4])
def test_causal_zigzag_steps_are_one_kernel_call_each(ring):
    layout, length = SequenceLayout("zigzag", ring), 8 * ring
    for i, j in itertools.product(range(ring), repeat=2):
        (task,) = tiles(Causal(), layout.ring_ranges(length, i), layout.ring_ranges(length, j))
        if i == j:
            assert task == TileTask(0, 8, 0, 8, Tile.CAUSAL)
        elif j < i:
            assert task == TileTask(0, 8, 0, 4, Tile.FULL)
        else:
            assert task == TileTask(4, 8, 0, 8, Tile.FULL)


def test_causal_striped_steps_are_plain_or_shifted_causal():
    layout = SequenceLayout("striped", 3)
    for i, j in itertools.product(range(3), repeat=2):
        (task,) = tiles(Causal(), layout.ring_ranges(24, i), layout.ring_ranges(24, j))
        shift = int(j > i)
        assert task == TileTask(shift, 8, 0, 8 - shift, Tile.CAUSAL)


@given(layouts(max_chunks=6))
def test_causal_balance_formulas(case):
    layout, s = case
    r = layout.ring
    expected = {
        "contiguous": (2 * s - s / r + 1) / (s + 1),
        "zigzag": 1.0,
        "striped": (s + r) / (s + 1),
    }[layout.kind]
    assert causal_balance(layout, s) == pytest.approx(expected, rel=1e-14)
    assert sum(work(Causal(), layout, s)) == s * (s + 1) // 2
    assert set(work(Full(), layout, s)) == {s * s // r}


def test_a_million_tokens_need_no_loop_over_tokens():
    layout = SequenceLayout("striped", 64, 8)
    s = 1 << 40
    assert causal_balance(layout, s) == pytest.approx((s + 64) / (s + 1), rel=1e-14)
    assert len(tiles(Causal(), layout.ring_ranges(s, 3), layout.ring_ranges(s, 60))) == 1
