"""How attention's work is spread over the rounds of a ring, in visible pairs of one head."""

from __future__ import annotations

from seqcomp.cost.shape import Block
from seqcomp.layout.halves import SMALLEST_HALF
from seqcomp.layout.intervals import visible_area
from seqcomp.layout.sequence import SequenceLayout


def round_pairs(block: Block, layout: SequenceLayout, length: int) -> tuple[float, ...]:
    """Pairs of the busiest rank in each round, ranks in step: one number a round.

    Round 0 is a rank's own block. Ranks wait for each other's keys, so a round takes as long as its
    busiest rank does.
    """
    r, c = layout.ring, length // layout.ring
    own, triangle = c * c, c * (c + 1) / 2
    if block.mask == "full":
        return (own,) * r
    if block.mask == "window":
        return _windowed(block, layout, length)
    match layout.kind:
        case "contiguous":
            return (triangle, *(own,) * (r - 1))
        case "zigzag":
            return (triangle, *(own / 2,) * (r - 1))
        case "striped":
            return (triangle,) * r


def keeps_back(block: Block, layout: SequenceLayout, length: int) -> bool:
    """Whether a rank computes half of its own block last in a backward, behind which the last
    gradients go home: where it is more than one small tile."""
    one = block.mask == "full" or (block.mask == "causal" and layout.kind != "zigzag")
    return not one or length // layout.ring >= 2 * SMALLEST_HALF


def _windowed(block: Block, layout: SequenceLayout, length: int) -> tuple[float, ...]:
    """Under a window: own keys first, then all that arrive, in equal parts."""
    ranges = [layout.ring_ranges(length, rank) for rank in range(layout.ring)]
    whole = (range(length),)
    most = max(visible_area(block.rule, q, whole) for q in ranges)
    own = max(visible_area(block.rule, q, q) for q in ranges)
    rest = layout.ring - 1
    return (own, *((most - own) / rest for _ in range(rest)))
