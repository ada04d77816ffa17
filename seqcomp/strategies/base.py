"""The vocabulary of the strategies: shapes, communication steps, FLOPs.

Bytes are logical payload that leaves one rank, its own part excluded, per layer; collectives
of parameter gradients, embedding, head and loss are not among them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from seqcomp.layout.heads import head_map

Kind = Literal["all_gather", "reduce_scatter", "all_to_all", "p2p", "all_reduce"]
Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention on the whole sequence of one data rank.

    Global sizes: ``batch`` x ``length`` tokens, ``heads`` query and ``kv_heads`` KV heads of
    ``head_dim``; ``hidden`` is the width between layers (heads * head_dim unless given),
    ``value_dim`` the width of a value head (head_dim unless given).
    ``element_bytes`` of activations, ``accumulator_bytes`` of travelling dK/dV (4; 8 for fp64).
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int = 2
    accumulator_bytes: int = 4
    hidden: int = 0
    value_dim: int = 0

    def __post_init__(self) -> None:
        if self.value_dim == 0:
            object.__setattr__(self, "value_dim", self.head_dim)
        if self.hidden == 0:
            object.__setattr__(self, "hidden", self.heads * self.head_dim)

    @property
    def tokens(self) -> int:
        """T = batch * length."""
        return self.batch * self.length

    @property
    def width(self) -> int:
        """A = heads * head_dim, elements of Q per token."""
        return self.heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Elements of the output per token: A unless value heads have a width of their own."""
        return self.heads * self.value_dim

    @property
    def kv_head(self) -> int:
        """Elements of one KV head per token: K and V, 2d."""
        return self.head_dim + self.value_dim

    def on_tensor_rank(self, degree: int) -> AttentionShape:
        """What ulysses and ring see beside a tensor axis: Hq/t and max(Hkv/t, 1) heads."""
        return replace(self, heads=self.heads // degree, kv_heads=max(self.kv_heads // degree, 1))

    def on_sequence_rank(self, degree: int) -> AttentionShape:
        """The same heads on 1/degree of the sequence."""
        return replace(self, length=self.length // degree)

    def on_ulysses_rank(self, degree: int) -> AttentionShape:
        """Between the all-to-alls: Hq/u query heads and max(Hkv, u)/u KV heads, all tokens.

        For heads that u does not divide, the slots of ``head_map``.
        """
        slots = head_map(self.heads, self.kv_heads, degree)
        return replace(self, heads=slots.rank_queries, kv_heads=slots.rank_keys)


@dataclass(frozen=True, slots=True)
class CommStep:
    """``count`` collectives of one kind over one axis; ``bytes_sent`` is their total.

    ``overlappable`` where computation that does not need the result is at hand.
    """

    kind: Kind
    axis: str
    bytes_sent: int
    count: int
    phase: Phase
    overlappable: bool


def total_bytes(steps: tuple[CommStep, ...], phase: Phase | None = None) -> int:
    """Sum of bytes sent, of one phase or of both."""
    return sum(step.bytes_sent for step in steps if phase in (None, step.phase))


def part(numerator: int, denominator: int) -> int:
    """An exact quotient of bytes; legal shapes divide, others are rounded up."""
    return -(-numerator // denominator)


def attention_flops(shape: AttentionShape, *, causal: bool, phase: Phase) -> int:
    """FLOPs of one layer's attention on the whole sequence, all ranks together.

    Forward 4*b*s^2*A, causal 2*b*s*(s+1)*A (pairs at or below the diagonal only); backward
    2.5 x, with the scores recomputed as flash attention does.
    """
    pairs = shape.length * (shape.length + 1) // 2 if causal else shape.length**2
    forward = 2 * shape.batch * pairs * (shape.width + shape.value_width)
    return forward if phase == "forward" else 5 * forward // 2
