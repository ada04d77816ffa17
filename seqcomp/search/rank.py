"""Best-first branch and bound: the cheapest compositions, with few of them priced.

Three levels: degrees; order, layout and transport; sharding. A branch is opened in the order of
a lower bound of its step time and left shut when the bound exceeds what has been found. How long
a composition takes and what it holds is asked of a ``Pricing``; nothing here knows a formula.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from seqcomp.hardware.cluster import Cluster
from seqcomp.search.composition import Composition, Degrees
from seqcomp.search.space import (
    Limits,
    Space,
    all_degrees,
    arrangements_of,
    orders_of,
    shardings_of,
)


class Price(Protocol):
    """What the ranking reads of an estimate."""

    @property
    def step_seconds(self) -> float:
        """Time of one step."""
        ...


P_co = TypeVar("P_co", bound=Price, covariant=True)
P = TypeVar("P", bound=Price)


class Pricing(Protocol[P_co]):
    """Estimates and bounds. Memory falls, and time rises, along the options of ``Space``."""

    def price(self, composition: Composition) -> P_co:
        """Time and memory of a composition."""
        ...

    def fits(self, composition: Composition) -> bool:
        """Whether it stays within the memory of a GPU."""
        ...

    def floor_of_degrees(self, degrees: Degrees) -> float:
        """No composition of these degrees takes less time, seconds; infinite: none can fit."""
        ...

    def floor(self, composition: Composition) -> float:
        """No sharding or option of memory makes this one faster, seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Ranked(Generic[P]):
    """A composition that fits and its price."""

    composition: Composition
    price: P


@dataclass(slots=True)
class Counts:
    """How the search went. ``priced``: estimates asked for; ``unfit``: degrees that cannot fit."""

    degrees: int = 0
    unfit: int = 0
    priced: int = 0


@dataclass(slots=True)
class Ranking(Generic[P]):
    """The best composition of each set of degrees, the best first; at most ``keep`` of them."""

    keep: int
    found: dict[Degrees, Ranked[P]] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    @property
    def ranked(self) -> tuple[Ranked[P], ...]:
        """Ascending in time; what was found first stands first among equals."""
        return tuple(sorted(self.found.values(), key=lambda item: item.price.step_seconds))

    def offer(self, item: Ranked[P]) -> None:
        """Keep it if it is the best of its degrees, and those among the best."""
        degrees = item.composition.degrees
        if item.price.step_seconds < self.bar(degrees):
            self.found[degrees] = item
            if len(self.found) > self.keep:
                del self.found[self.ranked[-1].composition.degrees]

    def bar(self, degrees: Degrees) -> float:
        """What a composition must be faster than to be of interest, seconds."""
        own = self.found.get(degrees)
        if own is not None:
            return own.price.step_seconds
        return math.inf if len(self.found) < self.keep else self.ranked[-1].price.step_seconds


def rank(
    gpus: int,
    limits: Limits,
    space: Space,
    pricing: Pricing[P],
    cluster: Cluster,
    *,
    keep: int = 5,
) -> Ranking[P]:
    """The fastest compositions that fit; empty where none does."""
    ranking: Ranking[P] = Ranking(keep)
    ticket = itertools.count()  # equal bounds are opened in the order of enumeration
    heap: list[tuple[float, int, Degrees, Composition | None]] = []
    for degrees in all_degrees(gpus, limits):
        ranking.counts.degrees += 1
        floor = pricing.floor_of_degrees(degrees)
        if math.isinf(floor):
            ranking.counts.unfit += 1
        else:
            heapq.heappush(heap, (floor, next(ticket), degrees, None))
    while heap:
        floor, _, degrees, arrangement = heapq.heappop(heap)
        if floor >= ranking.bar(degrees):
            continue
        if arrangement is None:
            for order in orders_of(degrees, cluster):
                for opened in arrangements_of(degrees, order, limits, space):
                    bound = max(floor, pricing.floor(opened))
                    heapq.heappush(heap, (bound, next(ticket), degrees, opened))
            continue
        for axes, reshard in shardings_of(degrees, space):
            fsdp = tuple(axis for axis in arrangement.order if axis in axes)
            for item in _fitting(replace(arrangement, fsdp=fsdp, reshard=reshard), space, pricing):
                ranking.counts.priced += 1
                ranking.offer(item)
    return ranking


def _fitting(start: Composition, space: Space, pricing: Pricing[P]) -> Iterator[Ranked[P]]:
    """Options of memory that fit: for each kind of checkpoint the fewest chunks that do."""
    for checkpoint in space.checkpoint:
        options = [
            replace(start, checkpoint=checkpoint, loss_chunks=chunks)
            for chunks in space.loss_chunks
        ]
        if not pricing.fits(options[-1]):
            continue
        chosen = next(option for option in options if pricing.fits(option))
        yield Ranked(chosen, pricing.price(chosen))
        if chosen == options[0]:
            return  # whatever keeps less takes longer
