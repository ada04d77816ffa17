"""Areas of masks over token sets: how much attention work a rank has, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from seqcomp.layout.masks import Causal, Mask, Tile
from seqcomp.layout.sequence import SequenceLayout


def visible_area(mask: Mask, q_ranges: Sequence[range], k_ranges: Sequence[range]) -> int:
    """Number of visible (query, key) pairs between two token sets of disjoint ascending ranges.

    O(log s) per pair of ranges for causal masks of any step.
    """
    return sum(_area(mask, q, k) for q in q_ranges for k in k_ranges)


def work(mask: Mask, layout: SequenceLayout, length: int) -> tuple[int, ...]:
    """Visible pairs of each ring rank's queries against the whole sequence."""
    whole = (range(length),)
    return tuple(
        visible_area(mask, layout.ring_ranges(length, rank), whole) for rank in range(layout.ring)
    )


def causal_balance(layout: SequenceLayout, length: int) -> float:
    """Causal work of the busiest ring rank over the mean, >= 1.

    contiguous (2s - s/r + 1)/(s + 1), zigzag exactly 1, striped (s + r)/(s + 1).
    """
    areas = work(Causal(), layout, length)
    return float(Fraction(max(areas) * len(areas), sum(areas)))


def _area(mask: Mask, q: range, k: range) -> int:
    if not len(q) or not len(k):
        return 0
    if isinstance(mask, Causal):
        return _causal_area(mask.offset, q, k)
    tasks = mask.split(q, k)
    exact = sum(task.area for task in tasks if task.kind is not Tile.PARTIAL)
    return exact + sum(
        bool(mask.visible(i, j))
        for task in tasks
        if task.kind is Tile.PARTIAL
        for i in q[task.q_start : task.q_stop]
        for j in k[task.k_start : task.k_stop]
    )


def _causal_area(offset: int, q: range, k: range) -> int:
    # Query a sees min(len(k), floor((q.start + offset - k.start + a * q.step) / k.step) + 1) keys.
    gap = q.start + offset - k.start
    first = min(len(q), max(0, -(gap // q.step)))
    saturated = (len(k) - 1) * k.step - gap
    last = min(len(q), max(first, -(-saturated // q.step)))
    ramp = _floor_sum(last - first, q.step, gap + first * q.step + k.step, k.step)
    return ramp + (len(q) - last) * len(k)


def _floor_sum(count: int, slope: int, start: int, divisor: int) -> int:
    """Sum of floor((slope * i + start) / divisor) for i < count; all >= 0, in O(log divisor)."""
    total = 0
    while count > 0:
        whole_slope, slope = divmod(slope, divisor)
        whole_start, start = divmod(start, divisor)
        total += whole_slope * count * (count - 1) // 2 + whole_start * count
        top = slope * count + start
        if top < divisor:
            break
        count, start = divmod(top, divisor)
        slope, divisor = divisor, slope
    return total
