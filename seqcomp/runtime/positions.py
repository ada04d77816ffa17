"""Positions in the whole as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def positions(ranges: Sequence[range], device: torch.device) -> Tensor:
    """Global positions of the concatenation of `ranges`."""
    if not ranges:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in ranges])
