"""The masks of tiles of a rule on positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from seqcomp.layout.masks import Mask
from seqcomp.runtime.positions import positions


class RuleMask:
    """What a rule shows of a tile: boolean, or for a band to be added.

    In a band only the distance counts, so that most tiles look like the one before.
    """

    def __init__(self, rule: Mask, device: torch.device) -> None:
        self._rule = rule
        self._device = device
        self._bias = lru_cache(maxsize=1)(self._bias_of)

    def of(self, q: Sequence[range], k: Sequence[range]) -> Tensor:
        """[queries, keys] of two sets of ascending positions."""
        if self._rule.limits is not None and len(q) == len(k) == 1 and q[0].step == k[0].step:
            farthest = q[0][-1] - k[0].start
            return self._bias(farthest, q[0].step, len(q[0]), len(k[0]))
        q_at, k_at = (positions(ranges, self._device) for ranges in (q, k))
        return self._rule.visible(q_at[:, None], k_at[None, :])

    def _bias_of(self, farthest: int, step: int, rows: int, columns: int) -> Tensor:
        """Made from its distances, of which there are as many as rows and columns."""
        gaps = farthest - step * torch.arange(rows + columns - 1, device=self._device)
        hidden = ~self._rule.visible(gaps, 0)
        bias = torch.zeros(hidden.shape, device=self._device).masked_fill_(hidden, -torch.inf)
        # What flip returns is not contiguous here.
        upwards = torch.arange(rows - 1, -1, -1, device=self._device)
        return bias.unfold(0, columns, 1).index_select(0, upwards)
