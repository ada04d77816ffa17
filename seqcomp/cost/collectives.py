"""How long collectives take: latency and bytes over the links that a group spans.

Bytes are what one rank sends (as of `CommStep`). Between nodes every rank sends through its own
network port; a group with k ranks in each node crosses nodes with k ports at once.
"""

from __future__ import annotations

import math
from typing import assert_never

from seqcomp.hardware.cluster import Cluster, Link, Span
from seqcomp.strategies.base import Kind


def collective_seconds(
    cluster: Cluster, span: Span, kind: Kind, bytes_sent: float, count: int = 1
) -> float:
    """Seconds of ``count`` collectives of a group that send ``bytes_sent`` in total."""
    if span.size == 1 or count == 0:
        return 0.0
    latency, bandwidth = _cost(cluster, span, kind)
    ring = count * latency + bytes_sent / bandwidth
    return min(ring, _tree(cluster, span, bytes_sent, count)) if kind == "all_reduce" else ring


def _cost(cluster: Cluster, span: Span, kind: Kind) -> tuple[float, float]:
    """Latency in s and bandwidth in bytes/s of one rank."""
    inside = _of_link(cluster.intra, kind, span.inside)
    if span.inside == span.size:
        return inside
    latency, bandwidth = _of_link(cluster.inter, kind, span.nodes)
    # Of a rank's peers, those in other nodes; of a ring's hops, the ones between nodes.
    away = (span.size - span.inside) / (span.size - 1)
    match kind:
        case "p2p":
            return latency, bandwidth
        case "all_to_all":
            across = bandwidth / away
        case "all_gather" | "reduce_scatter" | "all_reduce":
            across = bandwidth * span.inside / away
        case _:
            assert_never(kind)
    if span.inside == 1:
        return latency, across
    return latency + inside[0], min(across, inside[1])


def _of_link(link: Link, kind: Kind, ranks: int) -> tuple[float, float]:
    measured = link.measured(kind, ranks)
    if measured is not None:
        return measured.latency, measured.bandwidth
    return link.latency * _hops(kind, ranks), link.bandwidth


def _hops(kind: Kind, ranks: int) -> int:
    """Messages that follow each other: along a ring, or at once."""
    match kind:
        case "all_gather" | "reduce_scatter":
            return max(ranks - 1, 1)
        case "all_reduce":
            return 2 * max(ranks - 1, 1)
        case "all_to_all" | "p2p":
            return 1
        case _:
            assert_never(kind)


def _tree(cluster: Cluster, span: Span, bytes_sent: float, count: int) -> float:
    """An all-reduce up and down a tree: fewer messages, all bytes twice."""
    link = cluster.link_for(span)
    hops = 2 * math.ceil(math.log2(span.size))
    return count * link.latency * hops + bytes_sent * span.size / (span.size - 1) / link.bandwidth
