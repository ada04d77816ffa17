"""Hand-made costs: monotone along the options of memory, arbitrary elsewhere."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

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
from tests.fixtures.pricing import ideal

CLUSTER = ideal(gpus_per_node=4)


@dataclass(frozen=True)
class MadeUp:
    step_seconds: float


@dataclass
class HandMade:
    """Seconds and bytes from a digest of what is chosen: no order in them that code could lean on.

    ``slack``: how far below the truth the bounds are, as a share.
    """

    limits: Limits
    space: Space
    capacity: float
    seed: int = 0
    slack: float = 0.0
    asked: list[Composition] = field(default_factory=list)

    def price(self, composition: Composition) -> MadeUp:
        self.asked.append(composition)
        given_up, chunks = self._given_up(composition)
        return MadeUp(1 + self._digest(composition, "t") + 0.3 * given_up + 0.1 * chunks)

    def fits(self, composition: Composition) -> bool:
        given_up, chunks = self._given_up(composition)
        return 1 + self._digest(composition, "m") - 0.2 * given_up - 0.05 * chunks <= self.capacity

    def floor(self, composition: Composition) -> float:
        degrees = composition.degrees
        found = [
            1
            + self._digest(
                replace(composition, fsdp=_in_order(composition, axes), reshard=again), "t"
            )
            for axes, again in shardings_of(degrees, self.space)
        ]
        return min(found) * (1 - self.slack)

    def floor_of_degrees(self, degrees: Degrees) -> float:
        return (1 - self.slack) * min(
            self.floor(arranged)
            for order in orders_of(degrees, CLUSTER)
            for arranged in arrangements_of(degrees, order, self.limits, self.space)
        )

    def everything(self, gpus: int) -> list[tuple[Composition, float]]:
        """All that fit, with their seconds."""
        chosen = all_compositions(gpus, self.limits, self.space, CLUSTER)
        return [(c, self.price(c).step_seconds) for c in chosen if self.fits(c)]

    def _given_up(self, composition: Composition) -> tuple[int, int]:
        return (
            self.space.checkpoint.index(composition.checkpoint),
            self.space.loss_chunks.index(composition.loss_chunks),
        )

    def _digest(self, composition: Composition, salt: str) -> float:
        start = replace(composition, checkpoint="none", loss_chunks=1)
        text = f"{self.seed}{salt}{start}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def all_compositions(
    gpus: int, limits: Limits, space: Space, cluster: Cluster
) -> Iterator[Composition]:
    """The whole space, one by one."""
    for degrees in all_degrees(gpus, limits):
        shardings = list(shardings_of(degrees, space))
        for order in orders_of(degrees, cluster):
            for arranged, (axes, reshard), checkpoint, chunks in itertools.product(
                arrangements_of(degrees, order, limits, space),
                shardings,
                space.checkpoint,
                space.loss_chunks,
            ):
                yield replace(
                    arranged,
                    fsdp=_in_order(arranged, axes),
                    reshard=reshard,
                    checkpoint=checkpoint,
                    loss_chunks=chunks,
                )


def _in_order(composition: Composition, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in composition.order if axis in axes)
