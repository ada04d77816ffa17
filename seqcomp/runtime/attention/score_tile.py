"""One tile whose scores are modified element by element before the softmax."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqcomp.runtime.attention.pair_mask import PairMask


class Modified(ABC):
    """Stands where kernels take a mask; only "math" does."""

    @abstractmethod
    def of(self, scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Scaled scores [B, H, rows, k] -> (modified ones, -inf where a key is not seen, and
        their derivatives, 0 there)."""


@dataclass(frozen=True)
class ScoreTile(Modified):
    """seen: boolean, broadcastable to [B, H, q, k]. leaves: those of the tile's heads; q, k: global
    positions.
    """

    seen: Tensor
    program: PairMask
    leaves: Sequence[Tensor]
    q: Tensor
    k: Tensor

    def of(self, scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            given = scores.detach().requires_grad_()
            made = self.program.modified(given, self.leaves, self.q[rows], self.k)
            made = made.expand(scores.shape)
            slope = None
            if made.requires_grad:
                (slope,) = torch.autograd.grad(made.sum(), given, allow_unused=True)
        seen = self.seen[:, :, rows] if self.seen.shape[2] > 1 else self.seen
        slope = torch.zeros_like(scores) if slope is None else slope
        made = made.detach().to(scores.dtype).masked_fill(~seen, float("-inf"))
        return made, slope.masked_fill(~seen | made.isneginf(), 0.0)
