"""Tiles from a grid of classified blocks, as large as they can be.

Kernels are fast on many queries at once. Four equal neighbours become one block of twice the size,
level by level; on the diagonal, two causal blocks with a full one between them become a causal one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqcomp.layout.masks import Tile, TileTask, joined

EMPTY, FULL, CAUSAL, PARTIAL = range(4)
"""Kinds of blocks; PARTIAL also stands for a mixture."""

_TILES = {FULL: Tile.FULL, CAUSAL: Tile.CAUSAL}


def tasks_of(kinds: Tensor, rows: int, columns: int, block: int) -> tuple[TileTask, ...]:
    """kinds [query blocks, key blocks] on the CPU, of `block` queries x `block` keys (the last of
    each may be smaller) -> disjoint tasks that cover all but the empty ones.
    """
    levels = [kinds]
    while max(levels[-1].shape) > 1:
        levels.append(_halved(levels[-1]))
    tasks = _runs(kinds == PARTIAL, rows, columns, block)
    for depth, level in enumerate(levels):
        whole = (level == FULL) | (level == CAUSAL)
        if depth + 1 < len(levels):
            above = levels[depth + 1].repeat_interleave(2, 0).repeat_interleave(2, 1)
            whole &= above[: level.shape[0], : level.shape[1]] == PARTIAL
        size = block << depth
        for i, j in whole.nonzero().tolist():
            q_stop, k_stop = min((i + 1) * size, rows), min((j + 1) * size, columns)
            tasks.append(TileTask(i * size, q_stop, j * size, k_stop, _TILES[int(level[i, j])]))
    return joined(tasks)


def _halved(kinds: Tensor) -> Tensor:
    kinds = F.pad(kinds, (0, kinds.shape[1] % 2, 0, kinds.shape[0] % 2), value=EMPTY)
    first, right, below, last = (kinds[i::2, j::2] for i in (0, 1) for j in (0, 1))
    same = (first == right) & (first == below) & (first == last)
    triangle = (first == CAUSAL) & (right == EMPTY) & (below == FULL) & (last == CAUSAL)
    found = first.masked_fill(~same | (first == CAUSAL), PARTIAL)
    return found.masked_fill(triangle, CAUSAL)


def _runs(partial: Tensor, rows: int, columns: int, block: int) -> list[TileTask]:
    """Partial blocks side by side as one tile."""
    edges = F.pad(partial.to(torch.int8), (1, 1)).diff(dim=1)
    starts, stops = (edges == 1).nonzero().tolist(), (edges == -1).nonzero().tolist()
    return [
        TileTask(
            i * block,
            min((i + 1) * block, rows),
            first * block,
            min(last * block, columns),
            Tile.PARTIAL,
        )
        for (i, first), (_, last) in zip(starts, stops, strict=True)
    ]
