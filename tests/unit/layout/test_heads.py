"""Which rank has which heads: every query head once, with its KV head, for the fewest bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqcomp.layout.heads import ZERO, HeadMap, head_map
from seqcomp.plan.legality import head_degrees

SIZES = st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(1, 20))


def slots_of(found: HeadMap, rank: int) -> tuple[list[int], list[int]]:
    """(query head, KV head) of every slot of one rank, as a kernel pairs them."""
    n, m = found.rank_queries, found.rank_keys
    queries = list(found.queries[rank * n : (rank + 1) * n])
    keys = found.keys[rank * m : (rank + 1) * m]
    uses = found.uses_of(rank) or (1,) * m
    per_chunk = [head for head, count in zip(keys, uses, strict=True) for _ in range(count)]
    return queries, [head for head in per_chunk for _ in range(found.chunk)]


@given(SIZES)
def test_every_query_head_is_once_with_its_kv_head(sizes: tuple[int, int, int]) -> None:
    kv, group, degree = sizes
    found = head_map(kv * group, kv, degree)
    assert [head for head in found.queries if head != ZERO] == list(range(kv * group))
    for rank in range(degree):
        queries, keys = slots_of(found, rank)
        assert len(queries) == len(keys) == found.rank_queries
        for query, key in zip(queries, keys, strict=True):
            assert query == ZERO or key == query // group
        of_masks = found.heads_of(rank)
        assert all(q in (ZERO, head) for q, head in zip(queries, of_masks, strict=True))
        assert all(0 <= head < kv * group for head in of_masks)


@given(SIZES)
def test_no_equal_shares_do_less_work(sizes: tuple[int, int, int]) -> None:
    kv, group, degree = sizes
    assert head_map(kv * group, kv, degree).rank_queries == -(-kv * group // degree)


@given(SIZES)
def test_a_degree_that_fits_needs_no_zeros_and_no_second_copy(sizes: tuple[int, int, int]) -> None:
    kv, group, degree = sizes
    if degree not in head_degrees(kv * group, kv):
        return
    found = head_map(kv * group, kv, degree)
    assert found.queries == tuple(range(kv * group))
    copies = max(degree // kv, 1)
    assert found.keys == tuple(head for head in range(kv) for _ in range(copies))
    assert found.uses_of(0) is None


@pytest.mark.parametrize(
    ("heads", "kv", "degree", "queries", "keys"),
    [(28, 4, 7, 4, 2), (6, 3, 2, 3, 2), (10, 2, 4, 3, 1), (4, 2, 8, 1, 1), (32, 8, 3, 11, 4)],
)
def test_slots_of_a_rank(heads: int, kv: int, degree: int, queries: int, keys: int) -> None:
    found = head_map(heads, kv, degree)
    assert (found.rank_queries, found.rank_keys) == (queries, keys)


@given(SIZES)
def test_padding_kv_heads_first_never_moves_less(sizes: tuple[int, int, int]) -> None:
    """Against the simple way: KV heads up to a multiple of the degree, queries in proportion."""
    kv, group, degree = sizes
    found = head_map(kv * group, kv, degree)
    padded = -(-kv // degree) * degree
    assert len(found.queries) + len(found.keys) <= padded * group + padded
