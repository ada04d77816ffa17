"""What no composition can beat: the cost model itself, asked about a lighter load on better links.

Both bounds are estimates of the same model without its parameters: nothing is then sent, summed or
updated for them, whatever shards them, and all of it takes time that is not negative. Options of
memory only add work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from seqcomp.cost.shape import ModelShape, Parameters
from seqcomp.hardware.cluster import Cluster, Link
from seqcomp.plan.frozenmap import FrozenMap


def weightless(model: ModelShape) -> ModelShape:
    """The same sizes, and no parameter."""
    blocks = tuple(replace(block, parameters=Parameters(0)) for block in model.blocks)
    return replace(model, blocks=blocks, embedding=0, head=0, other=0)


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
