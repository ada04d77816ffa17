"""The mask of a tile in which only the distance from query to key counts.

It is no tensor: kernels take it in strips of rows, each with the keys that some of its rows see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ALIGNED = 16
"""Keys of a strip are a multiple, where there are so many: kernels take longer for others."""

Bias = Callable[[int, int, int, int], Tensor]


def bias_of(device: torch.device, down: int, up: int, rows: int, columns: int) -> Tensor:
    """[rows, columns]: 0 where row r sees column c, down <= c - r <= up, -inf elsewhere."""
    seen = torch.ones(rows, columns, dtype=torch.bool, device=device).tril_(up).triu_(down)
    return torch.zeros(rows, columns, device=device).masked_fill_(seen.logical_not_(), -torch.inf)


@dataclass(frozen=True)
class BandMask:
    """Row r of the tile sees the columns c with down <= c - r <= up.

    bias: `bias_of` on a device.
    """

    down: int
    up: int
    rows: int
    columns: int
    bias: Bias

    def strips(self, rows: int) -> Iterator[tuple[slice, slice, BandMask]]:
        """So many rows each (0: all of them), the columns that they see, and the mask of both.

        There are no columns where the rows see none.
        """
        for start in range(0, self.rows, rows or self.rows):
            stop = min(start + (rows or self.rows), self.rows)
            first, last = max(0, start + self.down), min(self.columns, stop + self.up)
            first = max(0, first - -(last - first) % ALIGNED) if first < last else last
            down, up = (x + start - first for x in (self.down, self.up))
            strip = replace(self, down=down, up=up, rows=stop - start, columns=last - first)
            yield slice(start, stop), slice(first, last), strip

    @property
    def transposed(self) -> BandMask:
        """Rows and columns in each other's place."""
        return BandMask(-self.up, -self.down, self.columns, self.rows, self.bias)

    def whole(self) -> Tensor | None:
        """[rows, columns], to be added; None where nothing is hidden."""
        if not any(True for _ in self.corners()):
            return None
        return self.bias(self.down, self.up, self.rows, self.columns)

    def corners(self) -> Iterator[tuple[slice, Tensor]]:
        """Columns of which some row does not see all, and what is to be added there."""
        left = min(self.columns, max(0, self.rows - 1 + self.down))
        right = max(0, self.up + 1)
        cuts = [(0, left), (right, self.columns)] if left < right else [(0, self.columns)]
        for start, stop in cuts:
            if start < stop:
                bias = self.bias(self.down - start, self.up - start, self.rows, stop - start)
                yield slice(start, stop), bias
