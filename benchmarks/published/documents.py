"""Packed documents: the varlen half of the README of ring-flash-attention.

Its benchmark packs 8192 tokens a GPU in four ways, one after the other, of which the table gives
the common rate. A ring and a zigzag ring cut every document into parts of its own, and send whole
blocks; the way of Llama 3 cuts the packed sequence, and gathers all keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from seqcomp.cost.alone import attention_timeline
from seqcomp.cost.rounds import Rounds, merged, rounds_of
from seqcomp.cost.run import Mode, Run
from seqcomp.hardware.cluster import Cluster
from seqcomp.layout.documents import Documents
from seqcomp.layout.masks import Causal
from seqcomp.layout.sequence import Layout, SequenceLayout

from .rows import LLAMA_8B, Row, plan_of

PACKED = ((8192,), (256, 7392, 544), (4096, 4096), (3104, 3200, 1600, 160, 128))
"""Lengths on one GPU; over the ring each document is eight times as long."""

RING = 8

VARLEN = {
    "a100": {"prefill": (66.5, 33.1, 47.9, 34.3), "train": (16.7, 8.7, 13.4, 9.7)},
    "h800": {"prefill": (106.6, 52.4, 74.8, 60.8), "train": (28.2, 14.4, 21.4, 16.4)},
}
"""Iterations a second, heads of Llama 3.1 8B: ideal (an eighth of the rate of one GPU with an
eighth of each document), ring, zigzag, gathered."""

WAYS = ("ideal", "contiguous", "zigzag", "gathered")


def whole(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Over the ring."""
    return tuple(RING * n for n in lengths)


def each_cut(lengths: tuple[int, ...], kind: Layout) -> Rounds:
    """Where every document is cut by itself."""
    layout = SequenceLayout(kind, RING)
    parts = [rounds_of(Causal(), layout, n) for n in whole(lengths)]
    each = tuple(merged(tiles) for tiles in zip(*(p.each for p in parts), strict=True))
    return Rounds(each, merged(p.whole for p in parts))


def seconds(cluster: Cluster, mode: Mode, way: str, lengths: tuple[int, ...]) -> float:
    """Of one iteration."""
    plan = plan_of({"ring": 1})
    if way == "ideal":
        run = Run(sum(lengths), mode=mode, documents=lengths)
        return RING * attention_timeline(plan, LLAMA_8B, cluster, run).now
    if way == "gathered":
        plan = plan_of({"ring": RING}, ring={"layout": "contiguous", "transport": "allgather"})
        rounds = rounds_of(
            Documents(whole(lengths)), SequenceLayout("contiguous", RING), RING * sum(lengths)
        )
    else:
        kind: Layout = "zigzag" if way == "zigzag" else "contiguous"
        plan = plan_of({"ring": RING}, ring={"layout": kind})
        rounds = each_cut(lengths, kind)
    run = Run(RING * sum(lengths), mode=mode)  # all keys travel
    return attention_timeline(plan, LLAMA_8B, cluster, run, rounds).now


def rate(cluster: Cluster, mode: Mode, way: str) -> float:
    """Iterations a second of all four packings in turn."""
    return len(PACKED) / sum(seconds(cluster, mode, way, lengths) for lengths in PACKED)


def varlen_rows(machine: str) -> Iterator[Row]:
    """Of ``a100`` or ``h800``."""
    modes: tuple[Mode, ...] = ("prefill", "train")
    for mode in modes:
        for way, published in zip(WAYS, VARLEN[machine][mode], strict=True):
            what = "forward" if mode == "prefill" else "forward + backward"
            yield Row(
                "ring-flash-attention",
                f"64K, packed, ring 8, {way}, {what}",
                published,
                "it/s",
                lambda c, m=mode, w=way: rate(c, m, w),
            )
