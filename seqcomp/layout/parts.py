"""How a dim that its axis does not divide is dealt out: ceil-sized parts, the last ones shorter.

The convention of torch.chunk and of DTensor's Shard: part i of a size n over P begins at i * c,
c = ceil(n / P), so that the last parts may be shorter, or empty.
"""

from __future__ import annotations


def part_size(size: int, parts: int) -> int:
    """Elements of the first and largest part."""
    return -(-size // parts)


def part(size: int, parts: int, index: int) -> range:
    """The elements of one part; `part(97, 4, 3) == range(75, 97)`."""
    step = part_size(size, parts)
    return range(min(index * step, size), min((index + 1) * step, size))
