"""Ring attention (Liu et al., 2023) and all-gather of K/V (Llama 3, 2024).

Everything but attention runs on s/P tokens. Q stays; K and V, KV heads only, visit every rank
in P-1 hops. In backward K/V make P-1 hops again, and so do dK/dV: the first block's
contribution stays at home, the travelling accumulator starts with the second block.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from seqcomp.strategies.base import AttentionShape, CommStep, part

Transport = Literal["p2p", "allgather"]
Layout = Literal["contiguous", "striped", "zigzag"]


@dataclass(frozen=True, slots=True)
class Ring:
    """Ring attention of ``degree`` ranks along ``axis``."""

    degree: int
    axis: str = "ring"
    transport: Transport = "p2p"

    def legal_degrees(self, shape: AttentionShape) -> None:
        """Heads set no limit."""
        del shape

    def comm_steps(self, shape: AttentionShape) -> tuple[CommStep, ...]:
        """Forward 2(P-1)/P*T*Hkv*d*e, backward 2(P-1)/P*T*Hkv*d*(e + a).

        K and V travel together: one exchange a hop, or one all-gather.
        """
        if self.degree == 1:
            return ()
        hops = self.degree - 1
        elements = hops * shape.tokens * shape.kv_heads * shape.kv_head
        kv = part(elements * shape.element_bytes, self.degree)
        grads = part(elements * shape.accumulator_bytes, self.degree)
        if self.transport == "allgather":
            return (
                CommStep("all_gather", self.axis, kv, 1, "forward", False),
                CommStep("all_gather", self.axis, kv, 1, "backward", False),
                CommStep("reduce_scatter", self.axis, grads, 1, "backward", False),
            )
        return (
            CommStep("p2p", self.axis, kv, hops, "forward", True),
            CommStep("p2p", self.axis, kv, hops, "backward", True),
            CommStep("p2p", self.axis, grads, hops, "backward", True),
        )


def causal_imbalance(layout: Layout, length: int, degree: int) -> Fraction:
    """Work of the busiest ring rank over the mean, causal attention, exact.

    contiguous (2s - s/r + 1)/(s + 1), zigzag 1, striped (s + r)/(s + 1).
    """
    if layout == "zigzag":
        return Fraction(1)
    if layout == "striped":
        return Fraction(length + degree, length + 1)
    return (2 * length - Fraction(length, degree) + 1) / (length + 1)
