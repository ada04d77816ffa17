"""Changes of a plan as text that can be pasted into it: each section once."""

from __future__ import annotations

from collections.abc import Iterable

Setting = tuple[str, str]
"""A section of the plan and what stands in its braces."""


def as_yaml(settings: Iterable[Setting]) -> str:
    """``memory: {checkpoint: block, loss_chunks: 8} and outputs: {logits: drop}``."""
    sections: dict[str, list[str]] = {}
    for section, text in settings:
        sections.setdefault(section, []).append(text)
    return " and ".join(f"{name}: {{{', '.join(texts)}}}" for name, texts in sections.items())
