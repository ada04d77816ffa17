"""Attention over packed documents: the lower half of the README of ring-flash-attention."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from seqcomp.cost.alone import attention_timeline
from seqcomp.cost.kernels import attention_seconds
from seqcomp.cost.layer import BACKWARD
from seqcomp.cost.rounds import round_pairs
from seqcomp.cost.run import Mode, Run
from seqcomp.hardware.cluster import Cluster
from seqcomp.layout.intervals import visible_area
from seqcomp.layout.masks import Causal
from seqcomp.layout.sequence import SequenceLayout

from .attention import K
from .rows import LLAMA_8B, Row, plan_of

RANKS = 8
BATCHES = ((8192,), (256, 7392, 544), (4096, 4096), (3104, 3200, 1600, 160, 128))
"""Tokens of each document on one of 8 GPUs, of the four batches that its benchmark has in turn."""

PACKED = {
    "a100": {"prefill": (66.5, 33.1, 47.9, 34.3), "train": (16.7, 8.7, 13.4, 9.7)},
    "h800": {"prefill": (106.6, 52.4, 74.8, 60.8), "train": (28.2, 14.4, 21.4, 16.4)},
}
"""Iterations a second: ideal (an eighth of what one GPU takes for 8K), a ring with contiguous and
with balanced documents, keys and values gathered."""

WAYS = ("ideal", "contiguous", "zigzag", "all-gather")


def packed_rate(cluster: Cluster, mode: Mode, way: str) -> float:
    """Iterations a second, over all batches."""
    return 1 / statistics.mean(_seconds(cluster, mode, way, batch) for batch in BATCHES)


def packed_rows(machine: str) -> Iterator[Row]:
    """Of ``a100`` or ``h800``."""
    modes: tuple[Mode, ...] = ("prefill", "train")
    for mode in modes:
        for way, rate in zip(WAYS, PACKED[machine][mode], strict=True):
            what = "forward" if mode == "prefill" else "forward + backward"
            yield Row(
                "ring-flash-attention",
                f"64K packed, {way}, {what}",
                rate,
                "it/s",
                lambda c, m=mode, y=way: packed_rate(c, m, y),
            )


def _seconds(cluster: Cluster, mode: Mode, way: str, documents: Sequence[int]) -> float:
    phases = (False, True) if mode == "train" else (False,)
    if way == "ideal":
        pairs = [n * (n + 1) / 2 for n in documents]
        return RANKS * sum(_tiles(cluster, pairs, backward=phase) for phase in phases)
    if way == "all-gather":
        work = [_busiest(cluster, documents, backward=phase) for phase in phases]
        return sum(work) + _gathers(cluster, mode)
    (block,) = LLAMA_8B.blocks
    layout = SequenceLayout("contiguous" if way == "contiguous" else "zigzag", RANKS)
    rounds = list(zip(*(round_pairs(block, layout, RANKS * n) for n in documents), strict=True))
    total = 0.0
    for phase in phases:
        merge, hop = _round(cluster, backward=phase)
        for index, pairs in enumerate(rounds):
            tile = _tiles(cluster, pairs, backward=phase) + (merge if index else 0.0)
            total += max(tile, hop if index < RANKS - 1 else 0.0)
    return total


def _tiles(cluster: Cluster, pairs: Sequence[float], *, backward: bool) -> float:
    """One tile of each document, each as efficient as its size lets it be."""
    (block,) = LLAMA_8B.blocks
    each = 4 * block.heads * block.head_dim * (BACKWARD if backward else 1)
    return sum(
        attention_seconds(cluster.device, "bf16", n, each * n, backward=backward) for n in pairs
    )


def _busiest(cluster: Cluster, documents: Sequence[int], *, backward: bool) -> float:
    """Of ranks with an eighth of the tokens in their order, whatever documents they are of."""
    bounds = [RANKS * n for n in (0, *accumulate(documents))]
    size = bounds[-1] // RANKS
    found = []
    for rank in range(RANKS):
        own = range(rank * size, (rank + 1) * size)
        pairs = []
        for first, last in pairwise(bounds):
            q = range(max(own.start, first), min(own.stop, last))
            if q:
                pairs.append(visible_area(Causal(), (q,), (range(first, q.stop),)))
        found.append(_tiles(cluster, pairs, backward=backward))
    return max(found)


def _gathers(cluster: Cluster, mode: Mode) -> float:
    """Gathers of keys and values, and scatters of their gradients; the mask is nothing to them."""
    ring = {"layout": "contiguous", "transport": "allgather"}
    found = attention_timeline(
        plan_of({"ring": RANKS}, ring=ring), LLAMA_8B, cluster, Run(64 * K, mode=mode)
    )
    return sum(found.exposed.values())


def _round(cluster: Cluster, *, backward: bool) -> tuple[float, float]:
    """What a round takes beside its tile, and a hop: those of one document as long as all."""
    plan, n = plan_of({"ring": RANKS}, ring={"layout": "contiguous"}), 8 * K
    name = "attention backward" if backward else "attention"
    found = attention_timeline(plan, LLAMA_8B, cluster, Run(64 * K, mode="train"))
    took = {e.what: e.end - e.start for e in found.events}
    tile = _tiles(cluster, [n * n], backward=backward)
    return took[f"{name} round 1"] - tile, took[f"{name} hop 1"]
