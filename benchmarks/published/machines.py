"""Machines that are calibrated: which constants, and to which rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from seqcomp.hardware.cluster import Cluster
from seqcomp.hardware.load import load_cluster

from . import constants as c
from .attention import ring_rows, usp_rows
from .documents import varlen_rows
from .overlap import overlap_rows
from .rows import Row
from .serving import pcie_rows, prefill_rows
from .training import megatron_rows, other_ways, titan_rows


@dataclass(frozen=True)
class Machine:
    """One cluster file and its constants.

    ``start``: those that are fitted, with where to begin. ``rows``: what they are fitted to,
    ``others``: what is only predicted. ``apart``: constants that are not fitted here but owed to a
    row all the same, each with that row.
    """

    name: str
    constants: Mapping[str, c.Constant]
    start: Mapping[str, float]
    rows: Sequence[Row]
    others: Sequence[Row] = ()
    apart: Mapping[str, str] = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster:
        return load_cluster(self.name)

    @property
    def every_row(self) -> tuple[Row, ...]:
        """All that is predicted."""
        return (*self.rows, *self.others)

    @property
    def owed(self) -> tuple[str, ...]:
        """Constants that rows have decided, which are fewer than the rows."""
        return (*self.start, *self.apart)

    def fit(self) -> dict[str, float]:
        return c.fit(self.cluster, self.constants, self.start, self.rows)


def machines() -> Iterator[Machine]:
    """All that are calibrated, and H100, which is not."""
    yield Machine(
        "l20",
        {
            "attention's share of peak": c.ATTENTION,
            "slowing by communication": c.CONTENTION,
            "latency, us": c.LATENCY,
            "p2p, GB/s": c.BANDWIDTH,
            "all-to-all of 2, GB/s": c.rate(("all_to_all",), 2),
            "all-to-all of 4, GB/s": c.rate(("all_to_all",), 4),
            "all-to-all of 8, GB/s": c.rate(("all_to_all",), 8),
        },
        {
            "attention's share of peak": 0.8,
            "slowing by communication": 0.3,
            "latency, us": 100,
            "p2p, GB/s": 10,
            "all-to-all of 2, GB/s": 10,
            "all-to-all of 4, GB/s": 4,
            "all-to-all of 8, GB/s": 1,
        },
        [*usp_rows("l20")],
    )
    yield Machine(
        "a100",
        {
            "a round of a ring, us": c.RING_ROUND,
            "all-to-all, GB/s": c.rate(("all_to_all",), 2, 8),
            "products' share of peak": c.DENSE,
        },
        {
            "a round of a ring, us": 100,
            "all-to-all, GB/s": 100,
            "products' share of peak": 0.7,
        },
        [*usp_rows("a100"), *ring_rows("a100"), *megatron_rows()],
        [*other_ways(), *varlen_rows("a100"), *prefill_rows(), *overlap_rows()],
        {
            "attention's share of peak": "64K, ring 8, ideal, forward",
            "attention's share of peak, backward": "64K, ring 8, ideal, forward + backward",
            "speed of the GPU of the long prefill": "the three rows of long prefill",
            "a hop between two DGX, GB/s": "the four rows of DistFlashAttn",
        },
    )
    yield Machine(
        "h800",
        {"attention's share of peak": c.ATTENTION, "a round of a ring, us": c.RING_ROUND},
        {"attention's share of peak": 0.4, "a round of a ring, us": 100},
        [*ring_rows("h800")],
        [*varlen_rows("h800")],
        {"attention's share of peak, backward": "64K, ring 8, ideal, forward + backward"},
    )
    yield Machine(
        "rtx-pro-6000-fp32",
        {
            "attention's share of peak": c.ATTENTION,
            "p2p, GB/s": c.BANDWIDTH,
            "all-gather and reduce-scatter of 8, GB/s": c.rate(("all_gather", "reduce_scatter"), 8),
        },
        {
            "attention's share of peak": 0.2,
            "p2p, GB/s": 20,
            "all-gather and reduce-scatter of 8, GB/s": 10,
        },
        [*pcie_rows()],
    )
    yield Machine("h100", {}, {}, [], [*titan_rows()])
