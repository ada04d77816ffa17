"""USP (Fang and Zhao, 2024): ulysses on the inner axis, ring on the outer one.

Between attention a rank holds s/(u*r) tokens; the ulysses exchange works within a ring rank's
s/r tokens, the ring then moves max(Hkv, u)/u KV heads. With r = 1 or u = 1 it is the pure case.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqcomp.strategies.base import AttentionShape, CommStep
from seqcomp.strategies.ring import Ring
from seqcomp.strategies.ulysses import Ulysses


@dataclass(frozen=True, slots=True)
class Usp:
    """Ring times ulysses."""

    ring: Ring
    ulysses: Ulysses

    @property
    def degree(self) -> int:
        """u * r."""
        return self.ring.degree * self.ulysses.degree

    def legal_degrees(self, shape: AttentionShape) -> tuple[int, ...]:
        """Those of ulysses; the ring adds no limit."""
        return self.ulysses.legal_degrees(shape)

    def comm_steps(self, shape: AttentionShape) -> tuple[CommStep, ...]:
        """(u-1)/u * T/(u*r) * (2A + 2*max(Hkv,u)*d)*e, and the ring on max(Hkv,u)/u KV heads."""
        inner = self.ulysses.comm_steps(shape.on_sequence_rank(self.ring.degree))
        outer = self.ring.comm_steps(shape.on_ulysses_rank(self.ulysses.degree))
        return inner + outer
