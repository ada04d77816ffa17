"""What was measured; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seqcomp.strategies.base import Kind

Rates = tuple[tuple[int, float], ...]
"""(rows or queries, FLOP/s)"""


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """Of one kind among ``ranks``: seconds and bytes/s that a rank sends; ``points`` are (bytes
    sent by a rank, seconds)."""

    kind: Kind
    ranks: int
    latency: float
    bandwidth: float
    points: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredKernels:
    """Of one rank. ``dense``: FLOP/s by dtype and rows, forward with backward. Attention in the
    first dtype by queries of a causal tile. Bytes/s of a copy and of a sum; seconds of the smallest
    operation. ``contention``: by which part of a transfer's time work beside it gets slower.
    ``memory``: bytes that one rank may use."""

    dense: Mapping[str, Rates]
    attention_forward: Rates
    attention_backward: Rates
    copy: float
    stream: float
    launch: float
    contention: float
    memory: int
