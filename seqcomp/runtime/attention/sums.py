"""Gradients of tokens, added up from tiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqcomp.runtime.attention.merge import accumulator_dtype

Part = tuple[int, int, Tensor, Tensor]
"""Keys [start, stop) of a block with what one tile gives to their dk and dv."""


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


def summed(
    like: tuple[Tensor, Tensor], parts: Sequence[Part], onto: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """dk and dv of a block shaped as ``like``; takes ownership of what is added up."""
    dk, dv = (TokenSum(x) for x in like)
    if onto is not None:
        for total, tensor in zip((dk, dv), onto, strict=True):
            total.add(0, tensor.shape[2], tensor)
    for start, stop, dk_part, dv_part in parts:
        dk.add(start, stop, dk_part)
        dv.add(start, stop, dv_part)
    return dk.result(), dv.result()
