"""What the rules need to know about a model; read from a captured graph elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """One attention: its module path, heads, and a short name of its mask: full, causal, window,
    data where it depends on inputs, other where it is not known."""

    where: str
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    mask: str = "causal"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as the rules see it; widths in elements, ``length`` in tokens, None = unknown.

    ``made_in``: the module with the first attention over a sequence that no input has.
    """

    attentions: tuple[AttentionFacts, ...]
    hidden: int
    mlp_width: int | None = None
    layers: int = 0
    vocab: int | None = None
    length: int | None = None
    made_in: str = ""

    @property
    def all_causal(self) -> bool:
        """True when there is attention and all of it is causal."""
        return bool(self.attentions) and all(item.causal for item in self.attentions)
