"""Gradients of tokens, added up from tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from seqcomp.runtime.attention.merge import accumulator_dtype
from seqcomp.runtime.attention.untouched import Untouched


class TokenSum:
    """A gradient [B,H,n,d] added up in accumulator dtype from parts along the tokens."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._dtype = accumulator_dtype(like.dtype)
        self._total: Tensor | None = None
        self._untouched = Untouched(like.shape[2])

    def add(self, start: int, stop: int, part: Tensor) -> None:
        """Takes ownership of ``part``."""
        first = self._untouched.take(start, stop)
        if self._total is None and stop - start == self._like.shape[2]:
            self._total = part.to(self._dtype)
            return
        own = self._own(start, stop)
        if first == [range(start, stop)]:
            own.copy_(part)
            return
        self._clear(first)
        own += part

    def room(self, start: int, stop: int) -> Tensor:
        """A view of the tokens' sum, to be added to."""
        own = self._own(start, stop)
        self._clear(self._untouched.take(start, stop))
        return own

    def result(self) -> Tensor:
        if self._total is None:
            return torch.zeros_like(self._like, dtype=self._dtype)
        self._clear(self._untouched.take(0, self._like.shape[2]))
        return self._total

    def _own(self, start: int, stop: int) -> Tensor:
        if self._total is None:
            # The heads of a token side by side, as in what kernels return.
            shape = self._like.transpose(1, 2).shape
            self._total = self._like.new_empty(shape, dtype=self._dtype).transpose(1, 2)
        return self._total[:, :, start:stop]

    def _clear(self, ranges: list[range]) -> None:
        assert self._total is not None
        for own in ranges:
            self._total[:, :, own.start : own.stop] = 0
