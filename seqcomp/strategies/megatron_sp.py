"""Megatron tensor and sequence parallelism (Korthikanti et al., 2022).

Norms, dropout and residual run on s/P tokens; all-gather before each column-parallel linear,
reduce-scatter after each row-parallel one; attention is split by heads. The gathered input is
not saved but gathered again in backward (6 collectives against 4).
"""

from __future__ import annotations

from dataclasses import dataclass

from seqcomp.plan.legality import divisors, head_degrees
from seqcomp.strategies.base import AttentionShape, CommStep, part


@dataclass(frozen=True, slots=True)
class MegatronSp:
    """Megatron-SP of ``degree`` ranks along ``axis``; ``mlp_width`` None = not a limit."""

    degree: int
    axis: str = "tensor"
    mlp_width: int | None = None

    def legal_degrees(self, shape: AttentionShape) -> tuple[int, ...]:
        """P divides Hq and the MLP width; P divides Hkv or Hkv divides P."""
        degrees = head_degrees(shape.heads, shape.kv_heads)
        if self.mlp_width is None:
            return degrees
        return tuple(sorted(set(degrees) & set(divisors(self.mlp_width))))

    def comm_steps(self, shape: AttentionShape) -> tuple[CommStep, ...]:
        """Forward 4(P-1)/P * T*h*e (2 all-gather + 2 reduce-scatter), backward 1.5 x."""
        if self.degree == 1:
            return ()
        payload = (self.degree - 1) * shape.tokens * shape.hidden * shape.element_bytes
        one = part(payload, self.degree)
        return (
            CommStep("all_gather", self.axis, 2 * one, 2, "forward", False),
            CommStep("reduce_scatter", self.axis, 2 * one, 2, "forward", False),
            CommStep("all_gather", self.axis, 4 * one, 4, "backward", False),
            CommStep("reduce_scatter", self.axis, 2 * one, 2, "backward", False),
        )
