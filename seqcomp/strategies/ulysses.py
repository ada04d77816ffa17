"""DeepSpeed-Ulysses (Jacobs et al., 2023): all-to-all between sequence and heads at attention.

Everything but attention runs on s/P tokens. Before attention Q, K and V exchange sequence
for heads, after it the output does the reverse. A KV head is sent to every rank whose query heads
need it, and heads that P does not divide are padded with zeros (layout/heads.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from seqcomp.plan.legality import head_degrees
from seqcomp.strategies.base import AttentionShape, CommStep, Phase, part


@dataclass(frozen=True, slots=True)
class Ulysses:
    """Ulysses of ``degree`` ranks along ``axis``."""

    degree: int
    axis: str = "ulysses"

    def legal_degrees(self, shape: AttentionShape) -> tuple[int, ...]:
        """P divides Hq, and P divides Hkv or Hkv divides P; with ``pad_heads`` any."""
        return head_degrees(shape.heads, shape.kv_heads)

    def comm_steps(self, shape: AttentionShape) -> tuple[CommStep, ...]:
        """(P-1)/P^2 * T*(2A + 2*max(Hkv, P)*d)*e forward, the same backward.

        Q, K and V travel in one exchange, the output in another; their gradients likewise. Padded
        heads are sent like others.
        """
        if self.degree == 1:
            return ()
        own = shape.on_ulysses_rank(self.degree)
        return tuple(
            self._exchange(shape, self.degree * width, phase)
            for phase in ("forward", "backward")
            for width in (own.width + own.kv_heads * own.kv_head, own.value_width)
        )

    def _exchange(self, shape: AttentionShape, width: int, phase: Phase) -> CommStep:
        payload = (self.degree - 1) * shape.tokens * width * shape.element_bytes
        sent = part(payload, self.degree**2)
        return CommStep("all_to_all", self.axis, sent, 1, phase, False)
