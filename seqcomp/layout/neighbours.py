"""Which tokens a rank needs of others where every token looks at its neighbours.

Token t of a convolution, a pooling or a shift looks at the tokens t + low to t + high. A rank owns
a few runs of tokens; each run needs what stands next to it, which other ranks hold. Only that
travels: as many tokens as the window is wide, at each end of a run, whatever the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from seqcomp.layout.sequence import SequenceLayout
from seqcomp.layout.travel import Intervals, place_in, united

OUTSIDE = -1
"""The source of what stands before the first token or behind the last one."""


@dataclass(frozen=True)
class Piece:
    """``count`` tokens of rank ``source``, from its local token ``start`` on; or of nobody."""

    source: int
    start: int
    count: int


@dataclass(frozen=True)
class Neighbours:
    """What every rank looks at, and what it needs of others for that.

    ``runs[rank]``: lengths of the rank's runs of tokens. ``pieces[rank]``: what they look at, one
    run after the other: of a run of n tokens n + ``width``. ``needs[receiver][source]``: local
    tokens of ``source`` that travel, each once.
    """

    width: int
    runs: tuple[tuple[int, ...], ...]
    pieces: tuple[tuple[Piece, ...], ...]
    needs: tuple[tuple[Intervals, ...], ...]

    def count(self, receiver: int, source: int) -> int:
        """Number of tokens that go from ``source`` to ``receiver``."""
        return sum(map(len, self.needs[receiver][source]))

    def sent(self, rank: int) -> int:
        return sum(self.count(receiver, rank) for receiver in range(len(self.needs)))

    @property
    def travels(self) -> bool:
        """Whether anything travels at all; the same on all ranks."""
        return any(self.sent(rank) for rank in range(len(self.needs)))

    def place(self, receiver: int, source: int, token: int) -> int:
        """Where a local token of ``source`` is among those that ``receiver`` gets of it."""
        return place_in(self.needs[receiver][source], token)


def neighbours(layout: SequenceLayout, length: int, low: int, high: int, wrap: bool) -> Neighbours:
    """The neighbours of all tokens; ``wrap``: the sequence is a circle and has no outside.

    Only for layouts in which a rank holds runs of adjacent tokens, which striped ones are not.
    """
    assert low <= high, f"a window from {low} to {high}"
    owned = [layout.ranges(length, rank) for rank in range(layout.size)]
    assert all(part.step == 1 for parts in owned for part in parts), f"{layout} has no runs"
    places = []
    for rank, parts in enumerate(owned):
        offset = 0
        for part in parts:
            places.append((part, rank, offset))
            offset += len(part)
    places.sort(key=lambda place: place[0].start)
    pieces = tuple(
        tuple(
            piece
            for part in parts
            for piece in _looked_at(part.start + low, part.stop + high, places, length, wrap)
        )
        for parts in owned
    )
    needs = tuple(
        tuple(
            united(
                range(p.start, p.start + p.count)
                for p in own
                if p.source == source and source != receiver
            )
            for source in range(layout.size)
        )
        for receiver, own in enumerate(pieces)
    )
    runs = tuple(tuple(map(len, parts)) for parts in owned)
    return Neighbours(high - low, runs, pieces, needs)


def _looked_at(
    start: int, stop: int, places: list[tuple[range, int, int]], length: int, wrap: bool
) -> Iterator[Piece]:
    """The pieces of the positions [start, stop), in order."""
    while start < stop:
        if not wrap and (start < 0 or start >= length):
            end = min(stop, 0) if start < 0 else stop
            yield Piece(OUTSIDE, 0, end - start)
            start = end
            continue
        at = start % length
        part, rank, offset = next(place for place in places if at in place[0])
        count = min(stop - start, part.stop - at)
        yield Piece(rank, offset + at - part.start, count)
        start += count
