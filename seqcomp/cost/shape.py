"""A model as the cost model sees it: sizes of its blocks, nothing of its code."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from seqcomp.cost.parts import Bytes, Cross, KeyNorm, Latent, Parameters, Saved
from seqcomp.layout.masks import Band, Causal, Full, Mask
from seqcomp.plan.facts import AttentionFacts, ModelFacts
from seqcomp.strategies.base import AttentionShape

MaskKind = Literal["full", "causal", "window", "data"]
"""Of "data" no rule is known: it counts as full, and may be causal, as of packed documents."""


@dataclass(frozen=True, slots=True)
class Block:
    """``count`` equal blocks: attention and an MLP (``mlp_width`` 0: none).

    mask: with ``window`` tokens, the query's own included, where it is one. ``experts``: of the
    MLP, of which each token visits ``active``. ``token_local``: all of the MLP is
    experts, which tensor ranks run whole on tokens of their own. ``scores``: numbers that autograd
    keeps of each head and pair of positions, where no fused kernel has such attention (softcaps,
    sinks) and neither a ring nor ulysses, which attend in tiles, takes its place; ``tiled``: it
    runs in tiles under every plan, as with dropout and with masks of data. ``ends_in_norm``:
    its backward needs what its last sum over tensor ranks gave. ``starts_in_product``: no norm
    stands before it, so that tensor ranks gather its input before it is called. ``by_tokens``:
    Megatron-SP leaves attention's linears whole, which run on a rank's own tokens. ``key_norm``:
    behind the projection to keys. ``source``: tokens of a sequence that the model makes itself
    (source.py), in place of the run's (0). ``whole``: what autograd keeps for each sequence
    whatever its length.
    """

    count: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    parameters: Parameters
    saved: Saved
    value_dim: int = 0
    mask: MaskKind = "causal"
    window: int = 0
    gated: bool = True
    experts: int = 0
    active: int = 0
    token_local: bool = False
    scores: int = 0
    tiled: bool = False
    latent: Latent | None = None
    ends_in_norm: bool = False
    key_norm: KeyNorm | None = None
    starts_in_product: bool = False
    by_tokens: bool = False
    cross: Cross | None = None
    source: int = 0
    whole: Saved | None = None

    @property
    def attentions(self) -> int:
        """Of one block."""
        return 1 if self.cross is None else 2

    def attention_matrices(self, hidden: int) -> int:
        """Parameters of the projections to queries and of the output, of all attentions."""
        made_of = self.latent.queries if self.latent and self.latent.queries else hidden
        values = self.value_dim or self.head_dim
        return self.attentions * self.heads * (self.head_dim * made_of + values * hidden)

    @property
    def rule(self) -> Mask:
        """The mask on positions."""
        if self.mask == "window":
            return Band(0, self.window - 1)
        return Causal() if self.mask == "causal" else Full()

    @property
    def active_parameters(self) -> float:
        """Of one block, those that a token is multiplied with."""
        p = self.parameters
        return (
            p.matrices + p.whole + (p.experts * self.active / self.experts if self.experts else 0)
        )

    def attention(self, batch: int, length: int, element_bytes: int, hidden: int) -> AttentionShape:
        """One layer's attention on whole sequences of one data rank."""
        return AttentionShape(
            batch=batch,
            length=length,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            hidden=hidden,
            element_bytes=element_bytes,
            accumulator_bytes=max(element_bytes, 4),
        )


@dataclass(frozen=True, slots=True)
class Apart:
    """Parameters outside of the blocks that fsdp gathers by themselves, and again in backward.

    ``words`` of them Megatron-SP cuts by vocabulary, ``other`` stay whole; ``first``: wanted before
    the first block.
    """

    words: int
    other: int = 0
    first: bool = False


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Blocks between an embedding and a head; ``tied``: they are one parameter. Without a head (and
    a loss) ``vocab`` is 0.

    ``embedding`` and ``head`` (0 where tied) count parameters that Megatron-SP cuts by vocabulary,
    ``other`` those that stay whole (last norm, learned positions). ``ends``: what autograd keeps
    per token outside of the blocks, of each logit ``logits_saved`` bytes apart from that. ``apart``
    counts parameters of these again: large ones that only one module has. ``by_tokens``: linears
    of blocks that Megatron-SP does not cut, which is not counted. Of ``other``, ``frozen`` are not
    trained. ``wide_loss``: logits are made fp32 for the loss. ``shared``: what blocks keep
    together, once for all (the result of an encoder); ``tables``: what does not learn of that, of
    the tokens of a tensor group (cosines of positions). ``sequences`` are embedded by the one
    embedding: of an encoder and its decoder where both are of tokens.
    ``whole_ends``: what autograd keeps outside of the blocks for each sequence whatever its length.
    """

    name: str
    hidden: int
    vocab: int
    blocks: tuple[Block, ...]
    embedding: int
    head: int
    other: int
    ends: Bytes
    logits_saved: float = 4.0
    tied: bool = False
    apart: tuple[Apart, ...] = ()
    by_tokens: tuple[str, ...] = ()
    frozen: int = 0
    wide_loss: bool = True
    shared: Saved | None = None
    tables: Bytes = field(default=Bytes(0, 0))
    sequences: int = 1
    whole_ends: Bytes | None = None

    @property
    def source(self) -> str:
        """How long the sequence of an encoder beside a decoder is; "" without one."""
        crosses = [b.cross for b in self.blocks if b.cross is not None]
        if not crosses:
            return ""
        own = crosses[0].source
        return f"{own} tokens of its own" if own else "as many tokens as the decoder"

    def saved_of_logit(self, element: int, tensor: int) -> float:
        """Bytes, where activations have `element` and `tensor` ranks share the vocabulary, which
        they do in fp32."""
        return self.logits_saved if self.wide_loss or tensor > 1 else element

    @property
    def layers(self) -> int:
        return sum(block.count for block in self.blocks)

    @property
    def parameters(self) -> int:
        """All, each once."""
        blocks = sum(block.count * block.parameters.total for block in self.blocks)
        return blocks + self.embedding + self.head + self.other

    @property
    def active_parameters(self) -> float:
        """Those that a token is multiplied with: matrices of its blocks and the head."""
        blocks = sum(block.count * block.active_parameters for block in self.blocks)
        return blocks + (self.embedding if self.tied else self.head)

    @property
    def all_causal(self) -> bool:
        """Whether there is attention and all of it is causal."""
        causal = (b.mask == "causal" and b.cross is None for b in self.blocks)
        return bool(self.blocks) and all(causal)

    @property
    def facts(self) -> ModelFacts:
        """For ``resolve`` and ``check_plan``: heads, widths and masks."""
        widths = [b.mlp_width for b in self.blocks if b.mlp_width and not b.experts]
        return ModelFacts(
            attentions=tuple(self._attentions()),
            hidden=self.hidden,
            mlp_width=math.gcd(*widths) if widths else None,
            layers=self.layers,
            vocab=self.vocab or None,
        )

    def _attentions(self) -> Iterator[AttentionFacts]:
        first = 0
        for block in self.blocks:
            yield AttentionFacts(
                where=f"layers.{first}",
                heads=block.heads,
                kv_heads=block.kv_heads,
                head_dim=block.head_dim,
                causal=block.mask == "causal",
                mask=block.mask,
            )
            if block.cross is not None:
                yield AttentionFacts(
                    where=f"layers.{first}.cross",
                    heads=block.heads,
                    kv_heads=block.kv_heads,
                    head_dim=block.head_dim,
                    causal=False,
                    mask="full",
                )
            first += block.count

    @classmethod
    def decoder(
        cls,
        *,
        layers: int,
        hidden: int,
        heads: int,
        vocab: int,
        mlp_width: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        gated: bool = True,
        tied: bool = False,
        mask: MaskKind = "causal",
        window: int = 0,
        experts: int = 0,
        active: int = 0,
        name: str = "decoder",
    ) -> ModelShape:
        """A decoder of equal blocks: Llama's where ``gated``, else GPT's (biases, LayerNorm)."""
        from seqcomp.cost.decoder import decoder_shape

        kv, d = kv_heads or heads, head_dim or hidden // heads
        return decoder_shape(
            layers=layers, hidden=hidden, heads=heads, kv_heads=kv, head_dim=d, vocab=vocab,
            mlp_width=mlp_width, gated=gated, tied=tied, mask=mask, window=window,
            experts=experts, active=active, name=name,
        )  # fmt: skip
