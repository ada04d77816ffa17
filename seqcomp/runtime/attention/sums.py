"""Gradients of tokens, added up from tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from seqcomp.runtime.attention.merge import accumulator_dtype


class TokenSum:
    """A gradient [B,H,n,d] added up in accumulator dtype from parts along the tokens."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._dtype = accumulator_dtype(like.dtype)
        self._total: Tensor | None = None

    def add(self, start: int, stop: int, part: Tensor) -> None:
        """Takes ownership of ``part``."""
        if self._total is None and stop - start == self._like.shape[2]:
            self._total = part.to(self._dtype)
        else:
            self.result()[:, :, start:stop] += part

    def result(self) -> Tensor:
        if self._total is None:
            self._total = torch.zeros_like(self._like, dtype=self._dtype)
        return self._total
