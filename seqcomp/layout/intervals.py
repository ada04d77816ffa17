"""Areas of masks over token sets: how much attention work a rank has, in closed form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from seqcomp.layout.bands import band_area
from seqcomp.layout.documents import Documents, counted
from seqcomp.layout.masks import Causal, Full, Mask, Tile
from seqcomp.layout.sequence import SequenceLayout


def visible_area(mask: Mask, q_ranges: Sequence[range], k_ranges: Sequence[range]) -> int:
    """Number of visible (query, key) pairs between two token sets of disjoint ascending ranges.

    O(log s) per pair of ranges for bands of any step.
    """
    return sum(_area(mask, q, k) for q in q_ranges for k in k_ranges)


def whole_area(mask: Mask, length: int) -> int:
    """Number of visible pairs of a whole sequence."""
    if not isinstance(mask, Documents):
        return visible_area(mask, (range(length),), (range(length),))
    return mask.once(
        "area", lambda: sum(n * whole_area(mask.rule, one) for one, n in counted(mask.lengths))
    )


def work(mask: Mask, layout: SequenceLayout, length: int) -> tuple[int, ...]:
    """Visible pairs of each ring rank's queries against the whole sequence."""
    if isinstance(mask, Documents):
        return mask.once(("work", layout.kind, layout.ring), lambda: _packed_work(mask, layout))
    return _work(mask, layout, length)


def balance_of(areas: Sequence[int]) -> float:
    """The busiest rank's over the mean, >= 1."""
    return float(Fraction(max(areas) * len(areas), sum(areas)))


def causal_balance(layout: SequenceLayout, length: int) -> float:
    """Causal work of the busiest ring rank over the mean, >= 1.

    contiguous (2s - s/r + 1)/(s + 1), zigzag exactly 1, striped (s + r)/(s + 1).
    """
    return balance_of(work(Causal(), layout, length))


def _work(mask: Mask, layout: SequenceLayout, length: int) -> tuple[int, ...]:
    whole = (range(length),)
    return tuple(
        visible_area(mask, layout.ring_ranges(length, rank), whole) for rank in range(layout.ring)
    )


def _packed_work(mask: Documents, layout: SequenceLayout) -> tuple[int, ...]:
    """Of striped ranks, whose places in documents that begin alike are alike, by closed forms."""
    ring = layout.ring
    if layout.kind != "striped" or mask.rule not in (Causal(), Full()):
        return _work(mask, layout, mask.length)
    found = [0] * ring
    alike = Counter((n, at % ring) for n, at in zip(mask.lengths, mask.starts, strict=False))
    for (n, at), count in alike.items():
        for rank in range(ring):
            first = (rank - at) % ring
            tokens = -(-(n - first) // ring)
            if tokens <= 0:
                continue
            seen = tokens * n
            if mask.rule == Causal():
                seen = tokens * (first + 1) + ring * tokens * (tokens - 1) // 2
            found[rank] += count * seen
    return tuple(found)


def _area(mask: Mask, q: range, k: range) -> int:
    if mask.limits is not None:
        return band_area(mask.limits, q, k)
    if isinstance(mask, Documents):
        return sum(_area(mask.rule, own, keys) for own, keys in mask.shared(q, k))
    tasks = mask.split(q, k)
    exact = sum(task.area for task in tasks if task.kind is not Tile.PARTIAL)
    return exact + sum(
        bool(mask.visible(i, j))
        for task in tasks
        if task.kind is Tile.PARTIAL
        for i in q[task.q_start : task.q_stop]
        for j in k[task.k_start : task.k_stop]
    )
