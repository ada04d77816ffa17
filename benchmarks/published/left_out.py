"""Of a machine with few rows: one decides one constant, and the others are predicted with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from seqcomp.hardware.cluster import Cluster

from . import constants as c
from .rows import Row
from .training import titan_rows

Decide = Callable[[Cluster, Row], tuple[float, Cluster]]
"""The value with which a row is met, and the cluster with it."""


@dataclass(frozen=True)
class LeftOut:
    """``constant`` got its ``value`` from the row ``by``; ``error``: of the ``row`` that was left
    out, as predicted with it."""

    constant: str
    value: float
    by: str
    row: str
    error: float


def left_out(cluster: Cluster) -> Iterator[LeftOut]:
    """H100's two rows, both ways.

    Time and memory have no constant in common: what either decides leaves the other where it was,
    and the errors that remain are those of a machine to which nothing is fitted.
    """
    speed, memory = titan_rows()
    decide: tuple[tuple[str, Row, Row, Decide], ...] = (
        ("products' share of peak", speed, memory, _share),
        ("memory taken over memory held", memory, speed, _reserve),
    )
    for name, by, other, found in decide:
        value, changed = found(cluster, by)
        yield LeftOut(name, value, by.name, other.name, other.error(changed))


def _share(cluster: Cluster, row: Row) -> tuple[float, Cluster]:
    known = {"share": c.DENSE}
    found = c.fit(cluster, known, {"share": c.DENSE.get(cluster)}, [row])
    return found["share"], c.with_constants(cluster, known, found)


def _reserve(cluster: Cluster, row: Row) -> tuple[float, Cluster]:
    """Of the caching allocator and all that is not counted; no part of a cluster."""
    return row.published / row.predict(cluster), cluster
