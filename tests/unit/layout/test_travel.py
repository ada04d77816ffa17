"""What travels: every visible key and few others, nothing twice, nothing where nothing is seen."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqcomp.layout.masks import Band, Causal, Full
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.layout.travel import Travel, keys_seen, travel_of, united
from tests.unit.layout.test_layout import layouts

KINDS = ("contiguous", "zigzag", "striped")


@settings(max_examples=200)
@given(layouts(), st.integers(-6, 6) | st.none(), st.integers(-6, 40))
def test_exactly_what_is_visible(case, low: int | None, high: int) -> None:
    layout, length = case
    mask = Band(low, high)
    ranks = [layout.ring_ranges(length, rank) for rank in range(layout.ring)]
    for q_ranges in ranks:
        for k_ranges in ranks:
            keys = [p for part in k_ranges for p in part]
            queries = [p for part in q_ranges for p in part]
            found = keys_seen(mask, q_ranges, k_ranges)
            sent = [key for run in found for key in run]
            assert len(found) <= len(q_ranges) * len(k_ranges)
            assert sent == sorted(set(sent))
            visible = [b for b, k in enumerate(keys) if any(mask.visible(q, k) for q in queries)]
            assert sent == visible


@given(st.lists(st.builds(range, st.integers(0, 30), st.integers(0, 30)), max_size=6))
def test_unions_have_gaps(runs: list[range]) -> None:
    found = united(runs)
    assert [k for run in found for k in run] == sorted({k for run in runs for k in run})
    assert all(a.stop < b.start for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("kind", KINDS)
def test_full_and_causal_attention_keep_the_ring(kind: str) -> None:
    layout = SequenceLayout(kind, 4)
    for mask in (Full(), Causal(), Causal(-3), Causal(5)):
        assert travel_of(mask, layout, 64) is None
    assert travel_of(Band(0, 3), SequenceLayout(kind), 64) is None


def test_windows_that_see_everything_keep_the_ring() -> None:
    assert travel_of(Band(-63, 63), SequenceLayout("contiguous", 4), 64) is None


def test_a_causal_window_needs_the_end_of_the_block_before() -> None:
    travel = travel_of(Band(0, 5), SequenceLayout("contiguous", 4), 64)
    assert travel is not None
    assert travel.steps == (1,)
    for rank in range(1, 4):
        assert travel.needs[rank][rank - 1] == (range(11, 16),)
    assert [travel.sent(rank) for rank in range(4)] == [(5,), (5,), (5,), ()]
    assert [travel.received(rank) for rank in range(4)] == [(), (5,), (5,), (5,)]
    assert [travel.place(2, 1, key) for key in (11, 15)] == [0, 4]
    with pytest.raises(AssertionError, match="token 10 does not travel"):
        travel.place(2, 1, 10)


def test_a_window_on_both_sides_has_two_neighbours_and_no_other_step() -> None:
    travel = travel_of(Band(-5, 5), SequenceLayout("contiguous", 8), 128)
    assert travel is not None
    assert travel.steps == (1, 7)
    assert [len(travel.received(rank)) for rank in range(8)] == [1, 2, 2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_is_received(kind: str) -> None:
    travel = travel_of(Band(0, 9), SequenceLayout(kind, 4), 64)
    if travel is None:
        assert kind == "striped"  # every stripe is seen nearly whole by all
        return
    total = sum(sum(travel.sent(rank)) for rank in range(4))
    assert total == sum(sum(travel.received(rank)) for rank in range(4))
    assert total < 4 * 3 * 16


@pytest.mark.parametrize("ring", [2, 4, 8, 64])
def test_a_window_costs_the_same_at_any_length(ring: int) -> None:
    window = 512
    for length in (1 << 17, 1 << 20, 1 << 30):
        for kind, most in (("contiguous", 1), ("zigzag", 2)):
            travel = travel_of(Band(0, window - 1), SequenceLayout(kind, ring), length)
            assert travel is not None
            received = [sum(travel.received(rank)) for rank in range(ring)]
            # The two chunks of the last rank of a zigzag are neighbours.
            assert max(received) == (window - 1) * (most if ring > 2 else 1)


def test_more_runs_than_one_lie_one_after_the_other() -> None:
    travel = Travel(16, (((), (range(2, 4), range(10, 12))), ((), ())))
    assert [travel.place(0, 1, key) for key in (2, 3, 10, 11)] == [0, 1, 2, 3]
    assert travel.sent(1) == travel.received(0) == (4,)
    assert travel.sent(0) == travel.received(1) == ()
    assert travel.steps == (1,)
    assert travel.saves()
