"""What a block is made of, as the cost model sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bytes:
    """Per token: ``fixed`` bytes and ``elements`` of the width of activations."""

    fixed: float
    elements: float

    def of(self, element_bytes: int) -> float:
        return self.fixed + self.elements * element_bytes


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd keeps per token of a rank, by the plan's ``memory.checkpoint``.

    On a rank whose tensors are all divided by the same degree (ring, data; Megatron-SP).
    ``attended``: of ``none``, what attention alone keeps of its queries, keys, values and output,
    in whose place Ulysses keeps them as they are between its exchanges.
    """

    none: Bytes
    selective: Bytes
    block: Bytes
    attended: Bytes = Bytes(0, 0)

    def of(self, checkpoint: str, element_bytes: int) -> float:
        """Bytes per token."""
        kept: Bytes = getattr(self, checkpoint)
        return kept.of(element_bytes)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of one block: ``matrices`` are cut by Megatron-SP, of them ``kv`` (the projections
    to keys and values) no further than the KV heads; ``experts``, ``norms`` and ``whole``
    (projections into a latent space, which tensor ranks run on tokens of their own) stay whole, and
    of the matrices ``fused``, of which the work alone is divided (``fused_kv`` of them of ``kv``).
    ``with_root``: other blocks use some of them, too, so that fsdp gathers all with the root's.
    """

    matrices: int
    kv: int = 0
    experts: int = 0
    norms: int = 0
    whole: int = 0
    fused: int = 0
    fused_kv: int = 0
    with_root: bool = False

    @property
    def total(self) -> int:
        return self.matrices + self.experts + self.norms + self.whole

    def on_tensor_rank(self, degree: int, kv_heads: int) -> int:
        """Of the matrices, how many one of ``degree`` ranks holds."""
        own = self.kv - self.fused_kv
        kv = own if degree > kv_heads else own // degree
        return (self.matrices - own - self.fused) // degree + kv + self.fused


@dataclass(frozen=True, slots=True)
class Latent:
    """Of latent attention (DeepSeek-V2, 2024), elements of a token: what queries are made of (0: of
    the hidden state), what keys and values are made of, and the key that positions turn, one for
    all heads."""

    queries: int
    keys: int
    rotary: int


@dataclass(frozen=True, slots=True)
class KeyNorm:
    """A norm of the keys of each head: what autograd keeps of a token's keys of all KV heads, and
    whether it has a weight. More tensor ranks than KV heads have all keys whole; a weight makes
    each of them scale those of its own tokens, which are gathered then."""

    kept: Bytes
    weighted: bool


@dataclass(frozen=True, slots=True)
class Cross:
    """The second attention of a decoder's block, of the heads of its first: over what an encoder
    gives, without a mask. ``kv`` are the parameters of its projections to keys and values, which
    the block's count, too; ``source`` as of `Block`."""

    kv: int
    source: int = 0
