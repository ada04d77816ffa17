"""The masks of tiles of a rule on positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from seqcomp.layout.bands import diagonals
from seqcomp.layout.masks import Mask
from seqcomp.runtime.attention.band_mask import BandMask, bias_of
from seqcomp.runtime.positions import positions


class RuleMask:
    """What a rule shows of a tile; most strips of a band look like the one before."""

    def __init__(self, rule: Mask, device: torch.device) -> None:
        self._rule = rule
        self._device = device
        self._bias = lru_cache(maxsize=2)(partial(bias_of, device))  # of both edges of a band

    def of(self, q: Sequence[range], k: Sequence[range]) -> Tensor | BandMask:
        """Of two sets of ascending positions; a tensor is boolean, [queries, keys]."""
        limits = self._rule.limits
        if limits is not None and len(q) == len(k) == 1 and q[0].step == k[0].step:
            down, up = diagonals(limits, q[0], k[0])
            return BandMask(down, up, len(q[0]), len(k[0]), self._bias)
        q_at, k_at = (positions(ranges, self._device) for ranges in (q, k))
        return self._rule.visible(q_at[:, None], k_at[None, :])
