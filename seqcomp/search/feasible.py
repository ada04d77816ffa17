"""Whether anything fits in memory, and where nothing does, what would: computed, not guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from seqcomp.plan.legality import divisors
from seqcomp.search.composition import Composition
from seqcomp.search.pricing import Pricer
from seqcomp.search.space import Space, all_degrees, thriftiest_of

MOST_GPUS = 1 << 20
"""Clusters beyond this are not suggested."""


@dataclass(frozen=True, slots=True)
class Held:
    """A composition, and the bytes on its fullest GPU."""

    composition: Composition
    bytes: int


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to change so that something fits, and what then holds least."""

    what: Literal["gpus", "seq_len", "batch"]
    value: int
    least: Held


def least_memory(pricer: Pricer, space: Space, gpus: int) -> Held:
    """What holds least; padding makes a ring of any size legal, so there always is something."""
    limits = pricer.limits(padding=True)
    held = (
        Held(composition, pricer.held(composition))
        for degrees in all_degrees(gpus, limits)
        for composition in thriftiest_of(degrees, limits, space)
    )
    return min(held, key=lambda item: item.bytes)


def changes(pricer: Pricer, space: Space, gpus: int) -> Iterator[Change]:
    """The nearest changes after which something fits: more GPUs, fewer tokens, fewer sequences.

    Of GPUs 2, 3, 4, 6, 8, 12, ... times as many are tried; of lengths, those that every composition
    divides; of batches, the divisors of the one asked for.
    """
    for count in _counts(gpus):
        found = _fitting(pricer, space, count)
        if found is not None:
            yield Change("gpus", count, found)
            break
    yield from _longest(pricer, space, gpus)
    for batch in reversed(divisors(pricer.run.batch)[:-1]):
        fewer = replace(pricer, run=replace(pricer.run, batch=batch))
        found = _fitting(fewer, space, gpus)
        if found is not None:
            yield Change("batch", batch, found)
            break


def _fitting(pricer: Pricer, space: Space, gpus: int) -> Held | None:
    found = least_memory(pricer, space, gpus)
    return found if found.bytes <= pricer.cluster.device.memory else None


def _counts(gpus: int) -> Iterator[int]:
    for power in range(1, MOST_GPUS.bit_length()):
        for count in (gpus << power, 3 * gpus << power - 1):
            if count <= MOST_GPUS:
                yield count


def _longest(pricer: Pricer, space: Space, gpus: int) -> Iterator[Change]:
    """A length that fits, if the shortest does, of which the next does not; nearly always the
    greatest: where MLPs begin to run in chunks, a longer sequence may hold less."""
    unit = 2 * gpus

    def at(units: int) -> Held | None:
        shorter = replace(pricer, run=pricer.run.with_length(units * unit))
        return _fitting(shorter, space, gpus)

    fits, does_not = 1, -(-pricer.run.seq_len // unit)
    found = at(fits) if does_not > 1 else None
    if found is None:
        return  # what does not depend on the length is too much already
    while does_not - fits > 1:
        middle = (fits + does_not) // 2
        better = at(middle)
        if better is None:
            does_not = middle
        else:
            fits, found = middle, better
    yield Change("seq_len", fits * unit, found)
