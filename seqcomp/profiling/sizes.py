"""How much is measured; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """``messages``: bytes that a rank sends in one collective. ``rows`` x ``width``: tokens and
    features of matrix products. ``tiles``: queries of attention with ``heads`` of ``head_dim``.
    ``stream``: bytes of the tensors of element-wise operations. ``repeats``: of which the median
    counts, each of ``window`` seconds at least: ranks that share a core take turns, and one turn
    alone would be too fast."""

    messages: tuple[int, ...]
    rows: tuple[int, ...]
    width: int
    tiles: tuple[int, ...]
    heads: int
    head_dim: int
    stream: int
    repeats: int
    window: float


CPU = Sizes(
    messages=(16 * KIB, 128 * KIB, MIB, 8 * MIB),
    rows=(16, 64, 256, 1024),
    width=512,
    tiles=(64, 256, 1024, 2048),
    heads=4,
    head_dim=64,
    stream=32 * MIB,
    repeats=7,
    window=0.02,
)
GPU = Sizes(
    messages=(16 * KIB, 256 * KIB, 4 * MIB, 64 * MIB, 256 * MIB),
    rows=(128, 512, 2048, 8192),
    width=8192,
    tiles=(512, 1024, 2048, 4096, 8192, 16384),
    heads=32,
    head_dim=128,
    stream=1024 * MIB,
    repeats=15,
    window=0.005,
)
QUICK = Sizes(
    messages=(4 * KIB, 256 * KIB),
    rows=(8, 32),
    width=64,
    tiles=(16, 64),
    heads=2,
    head_dim=16,
    stream=MIB,
    repeats=3,
    window=0.001,
)
