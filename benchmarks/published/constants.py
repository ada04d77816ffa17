"""The few constants of a machine that are fitted, by name: read from a cluster, and set in one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from seqcomp.hardware.cluster import Cluster, Curve, Kernels, Rate
from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.strategies.base import Kind

from .rows import Row


@dataclass(frozen=True)
class Constant:
    """How it is read from a machine and set in one."""

    get: Callable[[Cluster], float]
    set: Callable[[Cluster, float], Cluster]


def _kernels(cluster: Cluster, **changes: object) -> Cluster:
    kernels: Kernels = replace(cluster.device.kernels, **changes)  # type: ignore[arg-type]
    return replace(cluster, device=replace(cluster.device, kernels=kernels))


def _intra(cluster: Cluster, **changes: object) -> Cluster:
    return replace(cluster, intra=replace(cluster.intra, **changes))  # type: ignore[arg-type]


def _last(curve: Curve) -> float:
    return curve.points[-1][1]


def _scaled(curve: Curve, value: float) -> Curve:
    factor = value / _last(curve)
    return Curve(tuple((x, y * factor) for x, y in curve.points))


def _with_latency(cluster: Cluster, seconds: float) -> Cluster:
    rates = {
        kind: tuple(replace(rate, latency=seconds) for rate in own)
        for kind, own in cluster.intra.rates.items()
    }
    return _intra(cluster, latency=seconds, rates=FrozenMap(rates))


DENSE = Constant(
    lambda c: _last(c.device.kernels.dense),
    lambda c, value: _kernels(c, dense=Curve(((1, value),))),
)
"""Share of peak FLOP/s of matrix products, at every size."""

ATTENTION = Constant(
    lambda c: _last(c.device.kernels.attention_forward),
    lambda c, value: _kernels(
        c, attention_forward=_scaled(c.device.kernels.attention_forward, value)
    ),
)
"""Share of peak of attention's forward at the last point; the curve is scaled."""

RING_ROUND = Constant(
    lambda c: c.device.kernels.ring_round * 1e6,
    lambda c, value: _kernels(c, ring_round=value * 1e-6),
)
"""Microseconds of a round of a ring beside its tile."""

CONTENTION = Constant(
    lambda c: c.device.kernels.contention,
    lambda c, value: _kernels(c, contention=value),
)
"""Slowing of computation by communication under way."""

BANDWIDTH = Constant(
    lambda c: c.intra.bandwidth / 1e9,
    lambda c, value: _intra(c, bandwidth=value * 1e9),
)
"""GB/s inside a node of what has no rate of its own."""

LATENCY = Constant(lambda c: c.intra.latency * 1e6, lambda c, value: _with_latency(c, value * 1e-6))
"""Microseconds of a message inside a node, and of its collectives."""


def rate(kinds: tuple[Kind, ...], *ranks: int) -> Constant:
    """GB/s of collectives inside a node at some numbers of ranks."""

    def get(cluster: Cluster) -> float:
        known = cluster.intra.measured(kinds[0], ranks[0])
        return (known.bandwidth if known else cluster.intra.bandwidth) / 1e9

    def change(cluster: Cluster, value: float) -> Cluster:
        rates = dict(cluster.intra.rates)
        for kind in kinds:
            own = {known.ranks: known for known in rates.get(kind, ())}
            for count in ranks:
                late = own[count].latency if count in own else cluster.intra.latency
                own[count] = Rate(count, late, value * 1e9)
            rates[kind] = tuple(own[count] for count in sorted(own))
        return _intra(cluster, rates=FrozenMap(rates))

    return Constant(get, change)


def with_constants(
    cluster: Cluster, known: Mapping[str, Constant], values: Mapping[str, float]
) -> Cluster:
    """The same machine with other constants."""
    for name, value in values.items():
        cluster = known[name].set(cluster, value)
    return cluster


def loss(cluster: Cluster, rows: Sequence[Row]) -> float:
    """Sum of squared logarithms of predicted over published: being twice as fast and half as fast
    are equally wrong."""
    return sum(math.log(row.predict(cluster) / row.published) ** 2 for row in rows)


def fit(
    cluster: Cluster,
    known: Mapping[str, Constant],
    start: Mapping[str, float],
    rows: Sequence[Row],
    *,
    rounds: int = 60,
) -> dict[str, float]:
    """Least squares: one constant at a time by a factor, which shrinks when none helps."""
    values, step = dict(start), 0.5
    best = loss(with_constants(cluster, known, values), rows)
    for _ in range(rounds):
        better = False
        for name in start:
            for factor in (math.exp(step), math.exp(-step)):
                tried = {**values, name: values[name] * factor}
                found = loss(with_constants(cluster, known, tried), rows)
                if found < best:
                    values, best, better = tried, found, True
                    break
        if not better:
            step /= 2
        if step < 1e-3:
            break
    return values
