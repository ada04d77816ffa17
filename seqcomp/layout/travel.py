"""Which keys and values travel between the ranks of a ring, for one mask.

A ring sends every block to every rank. Where most of it would be sent in vain (windows,
documents), each rank sends straight to each other what that one's queries see.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from seqcomp.layout.bands import Limits
from seqcomp.layout.blocks import block_size
from seqcomp.layout.documents import Documents
from seqcomp.layout.masks import Causal, Full, Mask
from seqcomp.layout.sequence import SequenceLayout

Intervals = tuple[range, ...]
"""Disjoint ascending runs of local keys, with gaps between them."""


@dataclass(frozen=True)
class Travel:
    """``needs[receiver][source]``: the keys that ``receiver`` gets, of the ``keys`` of ``source``.

    What a rank needs of itself does not travel and is not looked at.
    """

    keys: int
    needs: tuple[tuple[Intervals, ...], ...]

    @property
    def size(self) -> int:
        return len(self.needs)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Steps t at which some rank r sends to (r + t) % size, neighbours on both sides first."""
        offsets = sorted(range(1, self.size), key=lambda t: (min(t, self.size - t), t))
        return tuple(
            t for t in offsets if any(self.count((r + t) % self.size, r) for r in range(self.size))
        )

    def count(self, receiver: int, source: int) -> int:
        """Number of keys that go from ``source`` to ``receiver``."""
        return self._counts[receiver][source]

    @cached_property
    def _counts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(sum(map(len, runs)) if runs else 0 for runs in row) for row in self.needs
        )

    def sent(self, rank: int) -> tuple[int, ...]:
        """Numbers of keys that ``rank`` sends to those who need some."""
        found = [self.count(to, rank) for to in range(self.size) if to != rank]
        return tuple(n for n in found if n)

    def received(self, rank: int) -> tuple[int, ...]:
        """Numbers of keys that ``rank`` gets from those that it needs some of."""
        found = [self.count(rank, source) for source in range(self.size) if source != rank]
        return tuple(n for n in found if n)

    @cached_property
    def busiest(self) -> int:
        """The rank that sends most keys and, in backward, gradients of keys; of several the first.

        The ends of a contiguous sequence under a causal window do one of both only.
        """
        return max(range(self.size), key=lambda r: sum(self.sent(r)) + sum(self.received(r)))

    def place(self, receiver: int, source: int, key: int) -> int:
        """Where a local key of ``source`` is among those that ``receiver`` gets."""
        return place_in(self.needs[receiver][source], key)

    def saves(self) -> bool:
        """Whether all ranks together send less than a ring would."""
        total = sum(sum(self.sent(rank)) for rank in range(self.size))
        return total < self.size * (self.size - 1) * self.keys


def travel_of(mask: Mask, layout: SequenceLayout, length: int) -> Travel | None:
    """What travels under a rule on positions; None where whole blocks go round the ring.

    Full and causal attention keep the ring: they need nearly all of it over the whole sequence,
    and a ring loads the links between neighbours only. Documents are known to ranks from the data
    of a call, block by block of a grid.
    """
    if layout.ring == 1 or isinstance(mask, Full | Causal):
        return None
    if isinstance(mask, Documents):
        return mask.once(
            ("travel", layout.kind, layout.ring), lambda: _of_documents(mask, layout, length)
        )
    ranks = [layout.ring_ranges(length, rank) for rank in range(layout.ring)]
    needs = tuple(tuple(keys_seen(mask, q, k) for k in ranks) for q in ranks)
    travel = Travel(length // layout.ring, needs)
    return travel if travel.saves() else None


def _of_documents(mask: Documents, layout: SequenceLayout, length: int) -> Travel | None:
    keys, ranks = length // layout.ring, range(layout.ring)
    block = block_size(keys)
    rows = [_outermost(layout.ring_ranges(length, rank), block) for rank in ranks]
    columns = [([first for first, _ in row], [last for _, last in row]) for row in rows]
    if layout.kind == "striped" and (keys % block or block) > 1:
        return None  # between the outermost of a block of any rank are some of every other
    wanted = [united(_positions_seen(mask, own)) for own in rows]
    needs = [
        tuple(_blocks_seen(own, firsts, lasts, block, keys) for firsts, lasts in columns)
        for own in wanted
    ]
    travel = Travel(keys, tuple(needs))
    return travel if travel.saves() else None


def _outermost(ranges: Sequence[range], block: int) -> list[tuple[int, int]]:
    """First and last position of each block of a rank's tokens."""
    starts = list(itertools.accumulate(map(len, ranges), initial=0))

    def position(token: int) -> int:
        at = bisect_right(starts, token) - 1
        return ranges[at][token - starts[at]]

    count = starts[-1]
    return [(position(at), position(min(at + block, count) - 1)) for at in range(0, count, block)]


def _positions_seen(mask: Documents, blocks: Iterable[tuple[int, int]]) -> Iterable[range]:
    """For each block of queries the positions between which what it sees must be."""
    limits = mask.rule.limits or Limits()
    for first, last in blocks:
        start, stop = mask.starts[mask.number(first)], mask.starts[mask.number(last) + 1]
        if limits.high is not None:
            start = max(start, first - limits.high)
        if limits.low is not None:
            stop = min(stop, last - limits.low + 1)
        yield range(start, max(start, stop))


def _blocks_seen(
    wanted: Intervals, firsts: Sequence[int], lasts: Sequence[int], block: int, keys: int
) -> Intervals:
    """The keys of the blocks of one rank that reach into wanted positions."""
    if not wanted or wanted[0].start > lasts[-1] or wanted[-1].stop <= firsts[0]:
        return ()
    runs = []
    for part in wanted:
        start, stop = bisect_left(lasts, part.start), bisect_left(firsts, part.stop)
        runs.append(range(start * block, max(start * block, min(stop * block, keys))))
    return united(runs)


def keys_seen(mask: Mask, q_ranges: Sequence[range], k_ranges: Sequence[range]) -> Intervals:
    """Local keys of the concatenation of ``k_ranges`` that some query sees, a run for each pair of
    ranges at most. Bounds what is seen from outside where ``mask`` is no band of equal steps.
    """
    runs, offset = [], 0
    for k in k_ranges:
        for q in q_ranges:
            seen = mask.keys_seen(q, k)
            runs.append(range(seen.start + offset, seen.stop + offset))
        offset += len(k)
    return united(runs)


def place_in(runs: Intervals, token: int) -> int:
    """Where a local token is among those of `runs`, one run behind the other."""
    offset = 0
    for run in runs:
        if token in run:
            return offset + token - run.start
        offset += len(run)
    raise AssertionError(f"token {token} does not travel: {runs}")


def united(runs: Iterable[range]) -> Intervals:
    """The union of runs; those that overlap or touch are one."""
    found: list[range] = []
    for run in sorted((r for r in runs if len(r)), key=lambda r: r.start):
        if found and run.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, run.stop))
        else:
            found.append(run)
    return tuple(found)
