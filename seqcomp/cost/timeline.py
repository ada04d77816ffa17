"""One layer on two streams: computation and communication, as events in seconds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

LONG = 16  # rounds
Stream = Literal["compute", "communication", "background"]


@dataclass(frozen=True, slots=True)
class Event:
    """``what`` occupies a stream from ``start`` to ``end``, seconds since the layer began.

    "background" is communication that waits for nothing here and is waited for at the end: gathers
    of the next block's parameters, sums of gradients.
    """

    stream: Stream
    what: str
    start: float
    end: float

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values with exactly the fields of this class."""
        return asdict(self)


@dataclass(slots=True)
class Timeline:
    """Events in their order; ``exposed``: seconds by axis in which computation waits."""

    contention: float = 0.0
    now: float = 0.0
    computing: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    links: dict[str, float] = field(default_factory=dict)

    def compute(self, what: str, seconds: float) -> None:
        """Computation that needs all that came before."""
        if seconds:
            self._add("compute", what, self.now, self.now + seconds)
            self.now += seconds
            self.computing += seconds

    def exchange(self, what: str, axis: str, link: str, seconds: float) -> None:
        """A collective that computation waits for."""
        if seconds:
            self._add("communication", what, self.now, self.now + seconds)
            self.now += seconds
            self._wait(axis, seconds)
            self.links[link] = self.links.get(link, 0.0) + seconds

    def rounds(
        self, what: str, axis: str, link: str, tiles: Sequence[float], hops: Sequence[float]
    ) -> None:
        """Round i computes ``tiles[i]`` while ``hops[i]`` is under way; a round ends with both.

        Of a long ring, equal rounds in a row are one event.
        """
        each = len(tiles) <= LONG
        index = 0
        for (tile, hop), run in itertools.groupby(zip(tiles, hops, strict=True)):
            left = len(list(run))
            while left:
                count = 1 if each else left
                self._round(what, axis, link, (tile, hop), range(index, index + count))
                index, left = index + count, left - count

    def _round(
        self, what: str, axis: str, link: str, times: tuple[float, float], which: range
    ) -> None:
        """``which`` equal rounds of one tile and one hop each."""
        tile, hop = times
        count = len(which)
        numbers = f"{which[0]} to {which[-1]}" if count > 1 else f"{which[0]}"
        slowed = tile + self.contention * min(tile, hop)
        took = count * max(slowed, hop)
        if tile:
            end = self.now + took - max(hop - slowed, 0.0)
            self._add("compute", f"{what} round {numbers}", self.now, end)
        if hop:
            end = self.now + took - max(slowed - hop, 0.0)
            self._add("communication", f"{what} hop {numbers}", self.now, end)
        self._wait(axis, count * max(hop - slowed, 0.0))
        self.computing += count * slowed
        self.now += took
        self.links[link] = self.links.get(link, 0.0) + count * hop

    def behind(self, what: str, axis: str, link: str, seconds: float) -> None:
        """Communication in the background of the whole timeline: the last thing to be added.

        It has what the link has left; the rest is waited for.
        """
        if not seconds:
            return
        left = max(self.now - self.links.get(link, 0.0), 0.0)
        self.computing += self.contention * min(seconds, left)
        self.now += self.contention * min(seconds, left)
        end = max(self.now, self.links.get(link, 0.0) + seconds)
        start = max((e.end for e in self.events if e.stream == "background"), default=0.0)
        self._add("background", what, start, min(start + seconds, end))
        self._wait(axis, end - self.now)
        self.now = end
        self.links[link] = self.links.get(link, 0.0) + seconds

    def _wait(self, axis: str, seconds: float) -> None:
        if seconds > 0:
            self.exposed[axis] = self.exposed.get(axis, 0.0) + seconds

    def _add(self, stream: Stream, what: str, start: float, end: float) -> None:
        self.events.append(Event(stream, what, start, end))
