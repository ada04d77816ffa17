"""Which parameters of a module have one row for each word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Vocabulary:
    """The embedding of words and the heads that give words, which may be the same parameter.

    A table of as many positions has the same shape: models of transformers say which is which, of
    others the first table (or, without one, parameter) is the embedding and linears are heads.
    """

    embedding: nn.Parameter | None
    heads: tuple[nn.Parameter, ...]

    @classmethod
    def of(cls, module: nn.Module, vocab: int, hidden: int) -> Vocabulary:
        """Of weights [vocab, hidden] alone."""
        every = [p for p in module.parameters() if tuple(p.shape) == (vocab, hidden)]
        linears = _weights(module, nn.Linear)
        tables = _weights(module, nn.Embedding)
        head = _said(module, "get_output_embeddings")
        loose = [p for p in every if id(p) not in linears | tables]
        embedding = _said(module, "get_input_embeddings")
        if embedding is None or id(embedding) not in map(id, every):
            embedding = next((p for p in every if id(p) in tables), next(iter(loose), None))
        heads = [p for p in every if p is head]
        heads = heads or [p for p in every if id(p) in linears]
        return cls(embedding, tuple(heads or (p for p in loose if p is not embedding)))

    def among(self, parameters: Iterator[nn.Parameter]) -> tuple[int, int]:
        """Of these, elements of the embedding, and of heads that are not the same."""
        given = {id(p) for p in parameters}
        own = self.embedding
        return (
            own.numel() if own is not None and id(own) in given else 0,
            sum(p.numel() for p in self.heads if p is not own and id(p) in given),
        )


def _weights(module: nn.Module, kind: type[nn.Module]) -> set[int]:
    return {id(part.weight) for part in module.modules() if isinstance(part, kind)}


def _said(module: nn.Module, name: str) -> nn.Parameter | None:
    try:
        found = getattr(module, name)().weight
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return found if isinstance(found, nn.Parameter) else None
