"""Heads of a rank in and out of tensors: those of a mask, and KV heads that chunks share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def of_heads(x: Tensor, heads: Sequence[int], dim: int) -> Tensor:
    """The part of some heads; a view where they are neighbours."""
    if isinstance(heads, range):
        return x.narrow(dim, heads.start, len(heads))
    return x.index_select(dim, torch.tensor(heads, device=x.device))


def repeated(x: Tensor, uses: Sequence[int] | None) -> Tensor:
    """KV heads [B, m, n, d] -> one for each chunk of query heads, in the same order."""
    if uses is None:
        return x
    heads = [x[:, i : i + 1].expand(-1, n, -1, -1) for i, n in enumerate(uses) if n]
    return torch.cat(heads, 1)


def summed(x: Tensor, uses: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    """The gradient of ``repeated``; in ``dtype`` where it adds up."""
    if uses is None:
        return x
    return torch.stack([part.sum(1, dtype=dtype) for part in x.split(list(uses), 1)], 1)
