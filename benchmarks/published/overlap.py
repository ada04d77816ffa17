"""What hiding hops gains between two nodes: the ablation of DistFlashAttn (Li et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from seqcomp.cost.alone import attention_timeline
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.hardware.cluster import Cluster

from .attention import K
from .rows import Row, plan_of

LLAMA_7B = ModelShape.decoder(
    layers=1, hidden=4096, heads=32, vocab=32000, mlp_width=11008, name="llama-7b"
)
RANKS = 16

HOP_GB_S = 31.0
"""The one free constant: what a hop gets between two DGX of A100, whose 100 Gb/s adapters are not
counted in the paper. Hops of this ring are twice as many as those of the paper's schedule, so that
a hop there had half of it."""


def overhead(cluster: Cluster, length: int, *, hidden: bool) -> float:
    """Time of attention's forward over that of its computation: 16 GPUs in two nodes."""
    pair = replace(cluster, inter=replace(cluster.inter, bandwidth=HOP_GB_S * 1e9))
    run = Run(length, mode="prefill")
    found = attention_timeline(plan_of({"ring": RANKS}), LLAMA_7B, pair, run)
    serial = sum(event.end - event.start for event in found.events)
    return (found.now if hidden else serial) / found.computing


def overlap_rows() -> Iterator[Row]:
    """105 % beside the computation where all is waited for, 44 % where hops are hidden; 8 and 1 %
    at twice and four times the length, where they take less than the computation."""
    measured = ((128, False, 2.05), (128, True, 1.44), (256, True, 1.08), (512, True, 1.01))
    for thousands, hidden, published in measured:
        length = thousands * K
        name = f"{thousands}K, hops {'hidden' if hidden else 'in turn'}"
        yield Row(
            "DistFlashAttn",
            name,
            published,
            "x",
            lambda c, n=length, h=hidden: overhead(c, n, hidden=h),
        )
