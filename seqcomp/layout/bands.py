"""Arithmetic of bands: pairs of positions with low <= query - key <= high.

A limit None is none. Everything is in closed form or linear in the number of tiles.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from seqcomp.layout.tiles import Tile, TileTask

SMALLEST_EDGE = 128
"""Rows of one tile along the lower edge of a band, at least."""


@dataclass(frozen=True)
class Limits:
    """low <= query - key <= high; None is no limit."""

    low: int | None = None
    high: int | None = None

    @property
    def transposed(self) -> Limits:
        """Of key - query."""
        low, high = (None if x is None else -x for x in (self.high, self.low))
        return Limits(low, high)


@dataclass(frozen=True)
class BandCut:
    """How a band is cut into tiles.

    parts: tiles along the lower edge have the band's width over this as rows, at least
    SMALLEST_EDGE. One makes the fewest kernel calls; more leave fewer pairs to the two triangles at
    the edges, for kernels that are slower on these than on rectangles.
    rows: a band of at most `widest` tokens is cut into so many queries each, with all keys that
    they see, for kernels that leave out what is hidden in the corners.
    """

    parts: int = 1
    rows: int = 0
    widest: int = 0


PLAIN = BandCut()


def split_band(
    limits: Limits, q: range, k: range, cut: BandCut = PLAIN, *, smallest: int = SMALLEST_EDGE
) -> list[TileTask]:
    """Disjoint tasks that cover exactly the visible pairs of two ascending ranges."""
    if not len(q) or not len(k):
        return []
    if q.step != k.step:
        return _in_strips(limits, q, k, smallest)
    down, up = diagonals(limits, q, k)
    first, last = max(0, -up), min(len(q), len(k) - down)
    if down > up or first >= last:
        return []
    if up - down < cut.widest and limits.low is not None and last + down > 1:
        return _in_strips(limits, q, k, cut.rows)
    rows = max(smallest, (up - down + 1) // cut.parts)
    # Rows from `saturated` on see up to the last key, those before `opened` from the first one.
    saturated = len(k) - up if up < len(k) - 1 else 0
    opened = 1 - down
    cuts = sorted({first, last, *(c for c in (saturated, opened) if first < c < last)})
    tasks: list[TileTask] = []
    for start, stop in itertools.pairwise(cuts):
        top = None if stop > saturated else up
        if stop <= opened:
            tasks += _upper_edge(start, stop, 0, top, len(k))
            continue
        for at in range(start, stop, rows):
            tasks += _both_edges(at, min(at + rows, stop), down, top, len(k))
    return tasks


def keys_in_band(limits: Limits, q: range, k: range) -> range:
    """Local keys that some query sees; exact for equal steps, else all between the outermost."""
    if not len(q) or not len(k):
        return range(0)
    if q.step != k.step:
        start, stop = _hull(limits, q, k)
        return range(start, stop) if band_area(limits, q, k) else range(0)
    down, up = diagonals(limits, q, k)
    first, last = max(0, -up), min(len(q), len(k) - down)
    if down > up or first >= last:
        return range(0)
    return range(max(0, first + down), min(len(k), last + up))


def band_area(limits: Limits, q: range, k: range) -> int:
    """Number of visible pairs of two ascending ranges, in O(log s)."""
    low, high = limits.low, limits.high
    if not len(q) or not len(k) or (low is not None and high is not None and low > high):
        return 0
    total = len(q) * len(k) if low is None else _causal_area(-low, q, k)
    return total - (0 if high is None else _causal_area(-high - 1, q, k))


def diagonals(limits: Limits, q: range, k: range) -> tuple[int, int]:
    """(down, up): local query a sees the local keys a + down <= b <= a + up; equal steps."""
    gap = q.start - k.start
    down = -len(q) if limits.high is None else -((limits.high - gap) // q.step)
    up = len(k) if limits.low is None else (gap - limits.low) // q.step
    return max(down, -len(q)), min(up, len(k))


def _upper_edge(start: int, stop: int, left: int, up: int | None, keys: int) -> list[TileTask]:
    """Rows that see all keys from `left` up to the diagonal `up`, or to the end."""
    if up is None:
        return _task(start, stop, left, keys, Tile.FULL)
    full = _task(start, stop, left, start + up, Tile.FULL)
    # A kernel has no use for a triangle of one.
    kind = Tile.CAUSAL if stop - start > 1 else Tile.FULL
    return full + _task(start, stop, start + up, stop + up, kind)


def _both_edges(start: int, stop: int, down: int, up: int | None, keys: int) -> list[TileTask]:
    """Rows that see the keys from the diagonal `down` on."""
    # The last row is left out of the lower triangle where its one key there is the upper one's.
    last = stop if up is None or stop + down <= start + up else stop - 1
    common = last + down  # from here on all of these rows see the keys
    if up is not None and common > start + up:
        return _task(start, stop, start + down, stop + up, Tile.PARTIAL)
    # A triangle of one is a square.
    kind = Tile.ANTICAUSAL if last - start > 1 else Tile.FULL
    return _task(start, last, start + down, common, kind) + _upper_edge(
        start, stop, common, up, keys
    )


def _task(q_start: int, q_stop: int, k_start: int, k_stop: int, kind: Tile) -> list[TileTask]:
    if q_start >= q_stop or k_start >= k_stop:
        return []
    return [TileTask(q_start, q_stop, k_start, k_stop, kind)]


def _in_strips(limits: Limits, q: range, k: range, rows: int) -> list[TileTask]:
    """Some rows and all keys from the first to the last that they see are one tile."""
    tasks = []
    rows_seen = keys_in_band(limits.transposed, k, q)
    for at in range(rows_seen.start, rows_seen.stop, rows):
        stop = min(at + rows, rows_seen.stop)
        part, keys = q[at:stop], keys_in_band(limits, q[at:stop], k)
        if not keys:
            continue
        whole = band_area(limits, part, k[keys.start : keys.stop]) == len(part) * len(keys)
        kind = Tile.FULL if whole else Tile.PARTIAL
        tasks += _task(at, stop, keys.start, keys.stop, kind)
    return tasks


def _hull(limits: Limits, q: range, k: range) -> tuple[int, int]:
    """Local keys between the smallest and the largest position that a query may see."""
    start = 0 if limits.high is None else _count_up_to(k, q[0] - limits.high - 1)
    stop = len(k) if limits.low is None else _count_up_to(k, q[-1] - limits.low)
    return start, max(start, stop)


def _count_up_to(positions: range, limit: int) -> int:
    return min(len(positions), max(0, (limit - positions.start) // positions.step + 1))


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
