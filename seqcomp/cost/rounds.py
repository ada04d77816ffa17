"""How attention's work is spread over the rounds of a ring, in visible pairs of one head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from seqcomp.cost.shape import Block
from seqcomp.layout.documents import Documents
from seqcomp.layout.halves import SMALLEST_HALF
from seqcomp.layout.intervals import visible_area, work
from seqcomp.layout.masks import Band, Full, Mask
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.layout.travel import travel_of

Tiles = tuple[tuple[float, float], ...]
"""(visible pairs of one tile, how many tiles have so many)."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """``each``: the tiles of the busiest rank in each round; round 0 is a rank's own block.
    ``whole``: of all rounds, of the rank that has most in all; ``rank``: which, None where all have
    the same."""

    each: tuple[Tiles, ...]
    whole: Tiles
    rank: int | None = None


def round_pairs(block: Block, layout: SequenceLayout, length: int) -> tuple[float, ...]:
    """Pairs of the busiest rank in each round, under the block's own mask."""
    return tuple(map(_pairs, rounds_of(block.rule, layout, length).each))


def rounds_of(mask: Mask, layout: SequenceLayout, length: int) -> Rounds:
    """Of one attention, ranks in step.

    Ranks wait for each other's keys, so a round takes as long as its busiest rank does. Where only
    keys that are seen travel, ranks wait for those alone: the busiest in all decides.
    """
    if isinstance(mask, Documents):
        return mask.once(("rounds", layout.kind, layout.ring), lambda: _packed(mask, layout))
    if isinstance(mask, Band):
        return _windowed(mask, layout, length)
    r, c = layout.ring, length // layout.ring
    own, triangle = c * c, c * (c + 1) / 2
    last = None
    pairs: tuple[float, ...]
    if isinstance(mask, Full):
        pairs = (own,) * r
    elif layout.kind == "contiguous":
        pairs, last = (triangle, *(own,) * (r - 1)), r - 1
    elif layout.kind == "zigzag":
        pairs = (triangle, *(own / 2,) * (r - 1))
    else:
        pairs = (triangle,) * r
    return Rounds(tuple(((p, 1.0),) for p in pairs), ((sum(pairs), 1.0),), last if r > 1 else None)


def keeps_back(mask: Mask, layout: SequenceLayout, length: int) -> bool:
    """Whether a rank computes half of its own block last in a backward, behind which the last
    gradients go home: where it is more than one small tile."""
    several = isinstance(mask, Band | Documents)
    one = isinstance(mask, Full) or (not several and layout.kind != "zigzag")
    return not one or length // layout.ring >= 2 * SMALLEST_HALF


def _windowed(mask: Mask, layout: SequenceLayout, length: int) -> Rounds:
    """Own keys first, then all that arrive, in equal parts."""
    areas = work(mask, layout, length)
    rank = max(range(layout.ring), key=areas.__getitem__)
    own = max(
        visible_area(mask, q, q)
        for r in range(layout.ring)
        for q in (layout.ring_ranges(length, r),)
    )
    most, rest = areas[rank], _hops(mask, layout, length)
    others = tuple((((most - own) / rest, 1.0),) for _ in range(rest))
    return Rounds((((own, 1.0),), *others), ((most, 1.0),), rank if min(areas) < most else None)


def _hops(mask: Mask, layout: SequenceLayout, length: int) -> int:
    """Rounds behind the first."""
    travel = travel_of(mask, layout, length)
    return layout.ring - 1 if travel is None else len(travel.steps)


# --- documents: tiles of each of them --------------------------------------------------------


def _packed(mask: Documents, layout: SequenceLayout) -> Rounds:
    length = mask.length
    ring, areas = layout.ring, work(mask, layout, length)
    ranks = [layout.ring_ranges(length, rank) for rank in range(ring)]
    busiest = max(range(ring), key=areas.__getitem__)
    rank = busiest if min(areas) < areas[busiest] else None
    own = _tiles(mask, ranks[busiest], ranks[busiest])
    hops = _hops(mask, layout, length)
    if ring > 1 and layout.kind == "striped":
        # Every rank has the same part of each document, of the keys of each rank.
        whole = _tiles(mask, ranks[busiest], (range(length),))
        part = tuple((pairs / ring, count) for pairs, count in whole)
        return Rounds((part,) * ring, whole, rank)
    if travel_of(mask, layout, length) is not None or ring == 1:
        others = [q for r, q in enumerate(ranks) if r != busiest]
        rest = merged(_tiles(mask, ranks[busiest], k) for k in others)
        spread = tuple((pairs, count / hops) for pairs, count in rest) if hops else ()
        return Rounds((own, *(spread,) * hops), merged((own, rest)), rank)
    every = [
        [_tiles(mask, ranks[r], ranks[(r - step) % ring]) for r in range(ring)]
        for step in range(ring)
    ]
    each = tuple(max(tiles, key=_pairs) for tiles in every)
    return Rounds(each, merged(tiles[busiest] for tiles in every), rank)


def _tiles(mask: Documents, q_ranges: Sequence[range], k_ranges: Sequence[range]) -> Tiles:
    found: Counter[float] = Counter()
    for q in q_ranges:
        for k in k_ranges:
            found.update(
                visible_area(mask.rule, (own,), (keys,)) for own, keys in mask.shared(q, k)
            )
    return tuple((pairs, float(count)) for pairs, count in sorted(found.items()) if pairs)


def merged(parts: Iterable[Tiles]) -> Tiles:
    """All of them together."""
    found: dict[float, float] = {}
    for part in parts:
        for pairs, count in part:
            found[pairs] = found.get(pairs, 0.0) + count
    return tuple(sorted(found.items()))


def _pairs(tiles: Tiles) -> float:
    return sum(pairs * count for pairs, count in tiles)
