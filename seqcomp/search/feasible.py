"""Whether anything fits in memory, and where nothing does, what would: computed, not guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from seqcomp.cost.estimate import Estimate
from seqcomp.plan.legality import divisors
from seqcomp.search.pricing import Pricer
from seqcomp.search.rank import Ranked
from seqcomp.search.space import Space, all_degrees, thriftiest_of

MOST_GPUS = 1 << 20
"""Clusters beyond this are not suggested."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to change so that something fits, and the composition that then holds least."""

    what: Literal["gpus", "seq_len", "batch"]
    value: int
    least: Ranked[Estimate]


def least_memory(
    pricer: Pricer, space: Space, gpus: int, *, until_it_fits: bool = False
) -> Ranked[Estimate] | None:
    """What holds least on its fullest GPU, or any that fits; None where nothing is legal."""
    best: Ranked[Estimate] | None = None
    limits = pricer.limits(padding=True)
    for degrees in all_degrees(gpus, limits):
        for composition in thriftiest_of(degrees, limits, space):
            price = pricer.price(composition)
            if best is None or price.peak_bytes < best.price.peak_bytes:
                best = Ranked(composition, price)
            if until_it_fits and price.fits:
                return best
    return best


def changes(pricer: Pricer, space: Space, gpus: int) -> Iterator[Change]:
    """The nearest changes after which something fits: more GPUs, fewer tokens, fewer sequences."""
    for count in _counts(gpus):
        found = _fitting(_grown(pricer, count), space, count)
        if found is not None:
            yield Change("gpus", count, found)
            break
    shorter = _longest(pricer, space, gpus)
    if shorter is not None:
        yield shorter
    for batch in reversed(divisors(pricer.run.batch)[:-1]):
        fewer = replace(pricer, run=replace(pricer.run, batch=batch))
        found = _fitting(fewer, space, gpus)
        if found is not None:
            yield Change("batch", batch, found)
            break


def _fitting(pricer: Pricer, space: Space, gpus: int) -> Ranked[Estimate] | None:
    found = least_memory(pricer, space, gpus, until_it_fits=True)
    return found if found is not None and found.price.fits else None


def _counts(gpus: int) -> Iterator[int]:
    """2, 3, 4, 6, 8, 12, ... times as many."""
    for power in range(1, MOST_GPUS.bit_length()):
        for count in (gpus << power, 3 * gpus << power - 1):
            if count <= MOST_GPUS:
                yield count


def _grown(pricer: Pricer, gpus: int) -> Pricer:
    """With a cluster of as many nodes as it takes."""
    nodes = -(-gpus // pricer.cluster.gpus_per_node)
    if nodes <= pricer.cluster.max_nodes:
        return pricer
    return replace(pricer, cluster=replace(pricer.cluster, max_nodes=nodes))


def _longest(pricer: Pricer, space: Space, gpus: int) -> Change | None:
    """The greatest length that fits, of those that divide for every composition."""
    unit = 2 * gpus

    def at(units: int) -> Ranked[Estimate] | None:
        shorter = replace(pricer, run=replace(pricer.run, seq_len=units * unit))
        return _fitting(shorter, space, gpus)

    fits, does_not = 1, -(-pricer.run.seq_len // unit)
    found = at(fits) if does_not > 1 else None
    if found is None:
        return None  # what does not depend on the length is too much already
    while does_not - fits > 1:
        middle = (fits + does_not) // 2
        better = at(middle)
        if better is None:
            does_not = middle
        else:
            fits, found = middle, better
    return Change("seq_len", fits * unit, found)
