"""Ring attention (Liu et al., 2023) and all-gather of K/V (Llama 3, 2024).

Everything but attention runs on s/P tokens. Q stays; K and V, KV heads only, visit every rank
in P-1 hops. In backward K/V make P-1 hops again, and so do dK/dV: the first block's
contribution stays at home, the travelling accumulator starts with the second block. Half of a
rank's own block is computed last in backward: behind it the last hop hides.

Under masks that leave most keys unseen (windows), each rank sends to each other just the keys that
one needs, and the gradients of the keys it got.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from seqcomp.layout.travel import Travel
from seqcomp.strategies.base import AttentionShape, CommStep, Kind, Phase, part

Transport = Literal["p2p", "allgather"]
Layout = Literal["contiguous", "striped", "zigzag"]


@dataclass(frozen=True, slots=True)
class Ring:
    """Ring attention of ``degree`` ranks along ``axis``.

    travel: where only some keys travel, those of every rank; what is sent then differs between
    ranks and ``rank`` is the one that is asked about. None: whole blocks, all ranks alike.
    """

    degree: int
    axis: str = "ring"
    transport: Transport = "p2p"
    travel: Travel | None = None
    rank: int = 0

    def legal_degrees(self, shape: AttentionShape) -> None:
        """Heads set no limit."""
        del shape

    def comm_steps(self, shape: AttentionShape) -> tuple[CommStep, ...]:
        """Forward 2(P-1)/P*T*Hkv*d*e, backward 2(P-1)/P*T*Hkv*d*(e + a).

        K and V travel together: one exchange a hop, or one all-gather.
        """
        if self.degree == 1:
            return ()
        if self.travel is not None:
            return self._needed(shape, self.travel)
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

    def _needed(self, shape: AttentionShape, travel: Travel) -> tuple[CommStep, ...]:
        assert travel.size == self.degree
        assert travel.keys * self.degree == shape.length
        width = shape.batch * shape.kv_heads * shape.kv_head
        together = self.transport == "allgather"

        def step(kind: Kind, keys: tuple[int, ...], size: int, phase: Phase) -> CommStep:
            sent, count = sum(keys) * width * size, 1 if together else len(keys)
            kind = kind if together else "p2p"
            return CommStep(kind, self.axis, sent, count, phase, not together)

        sent, received = travel.sent(self.rank), travel.received(self.rank)
        steps = (
            step("all_gather", sent, shape.element_bytes, "forward"),
            step("all_gather", sent, shape.element_bytes, "backward"),
            step("reduce_scatter", received, shape.accumulator_bytes, "backward"),
        )
        return tuple(s for s in steps if s.count)


def causal_imbalance(layout: Layout, length: int, degree: int) -> Fraction:
    """Work of the busiest ring rank over the mean, causal attention, exact.

    contiguous (2s - s/r + 1)/(s + 1), zigzag 1, striped (s + r)/(s + 1).
    """
    if layout == "zigzag":
        return Fraction(1)
    if layout == "striped":
        return Fraction(length + degree, length + 1)
    return (2 * length - Fraction(length, degree) + 1) / (length + 1)
