"""Single tokens of sharded ones: the owner gives its value, every other rank zeros.

The results are summands over the ranks; the sum is the token, and its gradient goes to the owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Lookup = Literal["lookup", "gather", "rows"]


def tokens_at(
    x: Tensor, dim: int, index: Tensor, length: int, own: Sequence[range], how: Lookup
) -> Tensor:
    """The tokens at global positions, and zeros for those of other ranks.

    x [..., n, ...]: this rank's tokens along `dim`, at the positions `own`. length: of the whole
    sequence, real tokens only. index, by `how`: "lookup" any shape, whose dims take the place of
    `dim`; "gather" as in torch.gather; "rows" [x.shape[0]], a token for each row, `dim` is 1.
    Positions that do not exist raise IndexError (or RuntimeError) as they do on one device.
    """
    index = index.to(x.device)  # constants of a graph are on the host
    wrapped = index if how == "gather" else torch.where(index < 0, index + length, index)
    local, found = torch.zeros_like(wrapped), torch.zeros_like(wrapped, dtype=torch.bool)
    offset = 0
    for part in own:
        steps = wrapped - part.start
        inside = (steps >= 0) & (wrapped < part.stop) & (steps % part.step == 0)
        local = torch.where(inside, offset + steps // part.step, local)
        found |= inside
        offset += len(part)
    # What no rank has stays out of range, and is refused by the operation itself.
    local = torch.where((wrapped < 0) | (wrapped >= length), index, local)
    if how == "gather":
        return x.gather(dim, local).masked_fill(~found, 0)
    if how == "rows":
        rows = torch.arange(x.shape[0], device=x.device)
        picked = x[rows, local]
        return picked.masked_fill(~_before(found, picked.dim() - found.dim()), 0)
    picked = x[(slice(None),) * dim + (local,)]
    return picked.masked_fill(~_before(found, x.dim() - dim - 1), 0)


def _before(mask: Tensor, dims: int) -> Tensor:
    return mask.reshape(*mask.shape, *(1,) * dims)
