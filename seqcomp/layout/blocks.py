"""The grid on which masks that depend on data are looked at."""

from __future__ import annotations

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 256


def block_size(rows: int) -> int:
    """Queries and keys per block of the grid: a power of two, about 1/64 of the rows."""
    size = SMALLEST_BLOCK
    while size < LARGEST_BLOCK and size * 64 < rows:
        size *= 2
    return size
