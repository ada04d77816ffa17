"""What the cost model knows about a machine; SI units throughout (bytes, seconds, FLOP/s)."""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.strategies.base import Kind


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured points (x, y), x ascending; between them linear in log x, outside constant."""

    points: tuple[tuple[float, float], ...]

    def at(self, x: float) -> float:
        """The value at x > 0."""
        index = bisect_left(self.points, (x,))
        if index == 0 or index == len(self.points):
            return self.points[min(index, len(self.points) - 1)][1]
        (x0, y0), (x1, y1) = self.points[index - 1 : index + 1]
        return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)


@dataclass(frozen=True, slots=True)
class Kernels:
    """How well a device is used; fractions of its peak FLOP/s or bandwidth.

    ``dense``: matrix products, by rows (tokens of a rank). ``attention_forward`` and ``_backward``:
    fused attention, by the queries of one tile, FLOPs of visible pairs (backward 2.5 x forward).
    ``streaming``: element-wise operations. ``launch``: seconds of one kernel at least.
    ``ring_round``: seconds that a round of ring attention takes beside its tile, merge and hop.
    ``contention``: by how much of the time of communication under way computation gets slower.
    """

    dense: Curve
    attention_forward: Curve
    attention_backward: Curve
    streaming: float
    launch: float
    ring_round: float = 0.0
    contention: float = 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU: usable ``memory`` in bytes, ``bandwidth`` of it in bytes/s, ``peak`` FLOP/s by dtype
    (dense, no sparsity), at least one: the first is that in which ``kernels`` were measured."""

    name: str
    memory: int
    bandwidth: float
    peak: FrozenMap[float]
    kernels: Kernels


@dataclass(frozen=True, slots=True)
class Rate:
    """A collective among ``ranks`` takes ``latency`` s plus its bytes sent over ``bandwidth``."""

    ranks: int
    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Link:
    """What joins GPUs: ``latency`` s of a message, ``bandwidth`` bytes/s of a GPU in one direction.

    ``rates``: measured ones of whole collectives, by kind and number of ranks (between nodes: of
    nodes), ascending.
    """

    name: str
    latency: float
    bandwidth: float
    rates: FrozenMap[tuple[Rate, ...]] = field(default_factory=FrozenMap)

    def measured(self, kind: Kind, ranks: int) -> Rate | None:
        """Of a collective of ``ranks``, in between and beyond as `Curve` does; None: unknown."""
        known = self.rates.get(kind)
        if not known:
            return None
        latency, bandwidth = (
            Curve(tuple((rate.ranks, getattr(rate, name)) for rate in known)).at(ranks)
            for name in ("latency", "bandwidth")
        )
        return Rate(ranks, latency, bandwidth)


@dataclass(frozen=True, slots=True)
class Span:
    """A group of ``size`` ranks of which ``inside`` share a node."""

    size: int
    inside: int

    @property
    def nodes(self) -> int:
        """Over how many nodes the group is spread."""
        return -(-self.size // self.inside)


@dataclass(frozen=True, slots=True)
class Cluster:
    """``max_nodes`` nodes of ``gpus_per_node`` devices; ``notes``: what its numbers leave out."""

    name: str
    device: Device
    gpus_per_node: int
    max_nodes: int
    intra: Link
    inter: Link
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """Of the whole cluster."""
        return self.gpus_per_node * self.max_nodes

    def span(self, axes: Mapping[str, int], names: Iterable[str]) -> Span:
        """Of the group along the axes ``names`` of a mesh (outermost first), nodes filled in order.

        Groups that straddle a node boundary count as if they had fewer neighbours.
        """
        wanted = set(names)
        size = math.prod(axes[name] for name in wanted)
        if math.prod(axes.values()) <= self.gpus_per_node:
            return Span(size, size)
        sizes = list(axes.items())
        strides = list(
            itertools.accumulate((n for _, n in reversed(sizes)), operator.mul, initial=1)
        )
        inside = 1
        for (name, count), stride in zip(reversed(sizes), strides, strict=False):
            if name in wanted and self.gpus_per_node % stride == 0:
                inside *= math.gcd(self.gpus_per_node // stride, count)
        return Span(size, inside)

    def link_for(self, span: Span) -> Link:
        """The slowest link that a group uses."""
        return self.intra if span.inside == span.size else self.inter
