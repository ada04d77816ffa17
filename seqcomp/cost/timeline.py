"""One layer on two streams: computation and communication, as events in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

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
        """Round i computes ``tiles[i]`` while ``hops[i]`` is under way; a round ends with both."""
        for index, (tile, hop) in enumerate(zip(tiles, hops, strict=True)):
            slowed = tile + self.contention * min(tile, hop)
            if tile:
                self._add("compute", f"{what} round {index}", self.now, self.now + slowed)
            if hop:
                name = f"{what} hop {index}"
                self._add("communication", name, self.now, self.now + hop)
            self._wait(axis, max(hop - slowed, 0.0))
            self.computing += slowed
            self.now += max(slowed, hop)
            self.links[link] = self.links.get(link, 0.0) + hop

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
