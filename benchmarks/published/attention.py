"""Attention alone: tables 3 and 4 of USP, and the README of ring-flash-attention."""

from __future__ import annotations

from collections.abc import Iterator

from seqcomp.cost.run import Mode
from seqcomp.hardware.cluster import Cluster

from .rows import LLAMA_8B, Row, attention_seconds

K = 1024
DEGREES = (8, 4, 2, 1)
"""Of Ulysses; the ring has the rest of eight."""

USP_L20 = {
    8 * K: ((57.3, 57.1), (153, 152), (415, 455), (359, 362)),
    32 * K: ((15.2, 14.3), (28.6, 32.8), (44.3, 62.8), (40.5, 58.4)),
    128 * K: ((2.56, 2.59), (3.22, 4.24), (3.40, 5.48), (3.13, 5.19)),
}
"""USP (Fang and Zhao, 2024), table 3: 8 L20 on PCIe, 32 query and 8 KV heads of 128, one sequence,
causal, forward; iterations a second with a contiguous and with a balanced ring."""

USP_A100 = {32 * K: ((135.6, 136.4), (103.5, 133.0), (91.4, 133.0), (82.0, 113.8))}
"""Table 4: 8 A100 SXM4 on NVLink."""

USP_A100_LONG = ((2.78, 2.79), (2.02, 2.77), (1.73, 2.89), (1.63, 2.91))
"""Its rows called 128K: absolute rates fit 256K, so that ratios alone are used, at that length."""

RFA = {
    "a100": {"prefill": (46.7, 24.0, 38.2, 32.5), "train": (11.8, 6.2, 10.6, 9.75)},
    "h800": {"prefill": (73.9, 38.5, 63.0, 55.0), "train": (19.3, 10.4, 17.4, 16.0)},
}
"""README of ring-flash-attention: heads as above, 8K tokens a GPU on 8 of them, forward and forward
with backward; ideal (an eighth of what one GPU takes for 8K causal, times 64), contiguous, zigzag,
striped."""

LAYOUTS = ("ideal", "contiguous", "zigzag", "striped")


def usp_rate(cluster: Cluster, length: int, ulysses: int, layout: str) -> float:
    """Iterations a second."""
    ring = 8 // ulysses
    return 1 / attention_seconds(
        cluster, LLAMA_8B, length, "prefill", ulysses=ulysses, ring=ring, layout=layout
    )


def usp_rows(machine: str) -> Iterator[Row]:
    """Of ``l20`` or ``a100``."""
    number, table = (3, USP_L20) if machine == "l20" else (4, USP_A100)
    for length, rates in table.items():
        for ulysses, both in zip(DEGREES, rates, strict=True):
            for layout, rate in zip(("contiguous", "zigzag"), both, strict=True):
                yield Row(
                    f"USP table {number}",
                    f"{length // K}K, ulysses {ulysses} x ring {8 // ulysses}, {layout}",
                    rate,
                    "it/s",
                    lambda c, n=length, u=ulysses, y=layout: usp_rate(c, n, u, y),
                )


def ring_rate(cluster: Cluster, mode: Mode, layout: str) -> float:
    """Iterations a second of 64K over a ring of 8; "ideal": as README has it."""
    if layout == "ideal":
        return 1 / (8 * attention_seconds(cluster, LLAMA_8B, 8 * K, mode))
    return 1 / attention_seconds(cluster, LLAMA_8B, 64 * K, mode, ring=8, layout=layout)


def ring_rows(machine: str) -> Iterator[Row]:
    """Of ``a100`` or ``h800``."""
    modes: tuple[Mode, ...] = ("prefill", "train")
    for mode in modes:
        for layout, rate in zip(LAYOUTS, RFA[machine][mode], strict=True):
            what = "forward" if mode == "prefill" else "forward + backward"
            yield Row(
                "ring-flash-attention",
                f"64K, ring 8, {layout}, {what}",
                rate,
                "it/s",
                lambda c, m=mode, y=layout: ring_rate(c, m, y),
            )
