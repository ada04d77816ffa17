"""Which tiles of one attention a rank computes, and the masks of those that need one.

Tiles are the same for all layers that share a mask: they are made once and kept.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqcomp.layout.masks import Mask, Tile, TileTask, joined, tiles
from seqcomp.layout.sequence import SequenceLayout, slice_ranges
from seqcomp.runtime.attention.heads import of_heads
from seqcomp.runtime.attention.pair_mask import PairMask, bounds

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 256
LONGEST_MASK = 4096  # keys of one tile that needs a mask: what is evaluated stays O(tile)


class Tiling(ABC):
    """Tiles of the queries of ring rank `rank` against the keys of ring rank `source`."""

    trained: tuple[Tensor, ...] = ()  # inputs of the mask that need gradients

    @abstractmethod
    def tasks(self, rank: int, source: int) -> tuple[TileTask, ...]: ...

    def gradients(
        self, task: TileTask, rank: int, source: int, heads: Sequence[int], cotangent: Tensor
    ) -> tuple[Tensor, ...]:
        """What the cotangent of one tile's mask gives to `trained`."""
        return ()

    @abstractmethod
    def mask(self, task: TileTask, rank: int, source: int, heads: Sequence[int]) -> Tensor:
        """Of a PARTIAL tile: boolean (True is seen) or additive, broadcastable to
        [B, H, rows, columns]. `heads`: for each of this rank's, one of the mask."""


@dataclass(frozen=True)
class StaticTiling(Tiling):
    """A mask that is a rule on positions. `real` of `length` tokens are not padding."""

    rule: Mask
    layout: SequenceLayout
    length: int
    device: torch.device
    real: int | None = None

    def tasks(self, rank: int, source: int) -> tuple[TileTask, ...]:
        keys = self._ranges(source)
        return tiles(
            self.rule, self._ranges(rank), keys if self.real is None else before(keys, self.real)
        )

    def mask(self, task: TileTask, rank: int, source: int, heads: Sequence[int]) -> Tensor:
        q = positions(self._ranges(rank), task.q_start, task.q_stop, self.device)
        k = positions(self._ranges(source), task.k_start, task.k_stop, self.device)
        return self.rule.visible(q[:, None], k[None, :])

    def _ranges(self, rank: int) -> tuple[range, ...]:
        return self.layout.ring_ranges(self.length, rank)


class DataTiling(Tiling):
    """A mask that depends on data: document numbers, padding, biases.

    A grid of blocks is classified by the bounds of the mask on each block; blocks that are seen
    whole run without a mask, hidden ones not at all.
    """

    def __init__(
        self,
        mask: PairMask,
        leaves: Sequence[Tensor],
        layout: SequenceLayout,
        length: int,
        device: torch.device,
        real: int | None = None,
    ):
        self._mask = mask
        self._leaves = tuple(x.detach() for x in leaves)
        # Held as they are: the attentions hand their gradients to these.
        self.trained = tuple(leaves[i] for i in mask.trained if leaves[i].requires_grad)
        self._trained_at = tuple(i for i in mask.trained if leaves[i].requires_grad)
        self._device = device
        self._layout = layout
        self._length = length
        self._real = length if real is None else real
        self._known: dict[tuple[int, int], tuple[TileTask, ...]] = {}
        self._lock = threading.Lock()  # autograd may run backward in other threads

    def tasks(self, rank: int, source: int) -> tuple[TileTask, ...]:
        with self._lock:
            if (rank, source) not in self._known:
                self._known[rank, source] = self._made(rank, source)
            return self._known[rank, source]

    def mask(self, task: TileTask, rank: int, source: int, heads: Sequence[int]) -> Tensor:
        q = self._queries(rank)[task.q_start : task.q_stop]
        k = self._keys(source)[task.k_start : task.k_stop]
        return self._mask.evaluate([_of_heads(x, heads) for x in self._leaves], q, k)

    def gradients(
        self, task: TileTask, rank: int, source: int, heads: Sequence[int], cotangent: Tensor
    ) -> tuple[Tensor, ...]:
        """What the cotangent [B, H, rows, columns] of one tile's mask gives to `trained`."""
        q = self._queries(rank)[task.q_start : task.q_stop]
        k = self._keys(source)[task.k_start : task.k_stop]
        leaves = list(self._leaves)
        inputs = [leaves[i].clone().requires_grad_() for i in self._trained_at]
        for at, leaf in zip(self._trained_at, inputs, strict=True):
            leaves[at] = leaf
        with torch.enable_grad():
            mask = self._mask.evaluate([_of_heads(x, heads) for x in leaves], q, k)
        own = cotangent.sum_to_size(torch.Size((1,) * (4 - mask.dim()) + tuple(mask.shape)))
        return torch.autograd.grad(mask, inputs, own.view(mask.shape).to(mask.dtype))

    def _queries(self, rank: int) -> Tensor:
        """Positions of all queries of a ring rank; padding sees what the last token sees."""
        ranges = self._layout.ring_ranges(self._length, rank)
        own = positions(ranges, 0, sum(map(len, ranges)), self._device)
        return own if self._real == self._length else own.clamp_(max=self._real - 1)

    def _keys(self, source: int) -> Tensor:
        ranges = before(self._layout.ring_ranges(self._length, source), self._real)
        return positions(ranges, 0, sum(map(len, ranges)), self._device)

    def _made(self, rank: int, source: int) -> tuple[TileTask, ...]:
        q, k = self._queries(rank), self._keys(source)
        if not len(k):
            return ()
        block = block_size(len(q))
        grid = bounds(self._mask, self._leaves, q, k, block)
        if self._mask.additive:
            empty = grid.high <= self._mask.hidden
            full = (grid.low == 0) & (grid.high == 0)
            if self.trained:
                full = torch.zeros_like(full)  # a bias of zeros has a gradient too
        else:
            empty, full = grid.high == 0, grid.low == 1
        if self._mask.additive and self._mask.hidden != -torch.inf:
            empty &= self._is_covered(q, block)[:, None]
        return _tasks(empty.tolist(), full.tolist(), len(q), len(k), block)

    def _is_covered(self, q: Tensor, block: int) -> Tensor:
        """Per block of queries: whether every query sees some key of the whole sequence.

        Only such rows may leave out what a finite number hides.
        """
        k = torch.arange(self._real, device=q.device)
        grid = bounds(self._mask, self._leaves, q, k, block)
        visible = (grid.low > self._mask.hidden).any(1)
        for index in (~visible).nonzero().flatten().tolist():
            own = q[index * block : (index + 1) * block]
            seen = torch.zeros(len(own), dtype=torch.bool, device=q.device)
            for at in (grid.high[index] > self._mask.hidden).nonzero().flatten().tolist():
                part = self._mask.evaluate(self._leaves, own, k[at * block : (at + 1) * block])
                seen |= (part > self._mask.hidden).any(-1).flatten(0, 1).all(0)
                if bool(seen.all()):
                    break
            visible[index] = bool(seen.all())
        return visible


def _of_heads(leaf: Tensor, heads: Sequence[int]) -> Tensor:
    return of_heads(leaf, heads, 1) if leaf.shape[1] > 1 else leaf


def block_size(rows: int) -> int:
    """Queries and keys per block of the grid: a power of two, about 1/64 of the rows."""
    size = SMALLEST_BLOCK
    while size < LARGEST_BLOCK and size * 64 < rows:
        size *= 2
    return size


def _tasks(
    empty: list[list[bool]], full: list[list[bool]], rows: int, columns: int, block: int
) -> tuple[TileTask, ...]:
    """Runs of equal blocks along the keys, joined along the queries where they are full."""
    tasks = []
    for index, (hidden, seen) in enumerate(zip(empty, full, strict=True)):
        start = 0
        kinds = [
            None if h else Tile.FULL if s else Tile.PARTIAL
            for h, s in zip(hidden, seen, strict=True)
        ]
        for at in range(1, len(kinds) + 1):
            small = kinds[start] is Tile.FULL or (at - start) * block < LONGEST_MASK
            if at < len(kinds) and kinds[at] == kinds[start] and small:
                continue
            kind = kinds[start]
            if kind is not None:
                q_start, k_start = index * block, start * block
                q_stop, k_stop = min(q_start + block, rows), min(at * block, columns)
                tasks.append(TileTask(q_start, q_stop, k_start, k_stop, kind))
            start = at
    return joined(tasks)


def before(ranges: Sequence[range], length: int) -> tuple[range, ...]:
    """The positions below `length`: of ascending ranges the first ones."""
    parts = (range(r.start, min(r.stop, length), r.step) for r in ranges)
    return tuple(part for part in parts if len(part))


def positions(ranges: Sequence[range], start: int, stop: int, device: torch.device) -> Tensor:
    """Global positions of the tokens [start, stop) of the concatenation of `ranges`."""
    parts = slice_ranges(ranges, start, stop)
    if not parts:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in parts])
