"""What no composition can beat: the cost model itself, asked about a lighter load on better links.

Both bounds are estimates in which nothing is sent for parameters, whatever shards them, and a rank
updates as few as possible; what is left out takes time that is not negative. Options of memory only
add work, so the least that can fit is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from seqcomp.cost.workload import Workload
from seqcomp.hardware.cluster import Cluster, Link
from seqcomp.plan.frozenmap import FrozenMap


def without_parameters(work: Workload) -> Workload:
    """What is sent for activations alone."""
    return Workload(
        tuple(replace(block, parameters=()) for block in work.blocks),
        tuple((where, step) for where, step in work.ends if where not in ("gradients", "behind")),
    )


def ideal(cluster: Cluster, gpus: int) -> Cluster:
    """One node of ``gpus`` such devices on a link without latency, as fast as the fastest."""
    fastest = max(max(_bandwidths(link)) for link in (cluster.intra, cluster.inter))
    link = Link("ideal", 0.0, fastest, FrozenMap())
    return replace(cluster, gpus_per_node=gpus, max_nodes=1, intra=link, inter=link)


def _bandwidths(link: Link) -> Iterable[float]:
    yield link.bandwidth
    for rates in link.rates.values():
        for rate in rates:
            yield rate.bandwidth
