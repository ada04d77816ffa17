"""Which tiles of one attention a rank computes, and the masks of those that need one.

Tiles are the same for all layers that share a mask: they are made once and kept.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from seqcomp.layout.bands import PLAIN, BandCut
from seqcomp.layout.blocks import block_size
from seqcomp.layout.cuts import Grain, cut
from seqcomp.layout.halves import Halves, halves
from seqcomp.layout.masks import Mask, Tile, TileTask, tiles
from seqcomp.layout.sequence import SequenceLayout, slice_ranges
from seqcomp.layout.travel import Intervals, Travel, travel_of, united
from seqcomp.runtime.attention.grid import CAUSAL, EMPTY, FULL, PARTIAL, tasks_of
from seqcomp.runtime.attention.heads import of_heads
from seqcomp.runtime.attention.hidden_rows import HiddenRows
from seqcomp.runtime.attention.pair_bounds import bounds
from seqcomp.runtime.attention.pair_mask import PairMask
from seqcomp.runtime.attention.rule_mask import RuleMask
from seqcomp.runtime.attention.score_tile import ScoreTile
from seqcomp.runtime.attention.tile_mask import TileMask
from seqcomp.runtime.positions import positions

# The CPU's flash kernel skips keys in blocks of 512: smaller triangles cost as much as squares, and
# tiles of less than 128 rows and keys cost more in copies and sums than they spare. What remains of
# that in a narrow band costs more than the corners of strips: see cpu_matmul, and strips for half
# precision, which that does not take.
CPU_CUT = BandCut(parts=2, rows=4096, widest=1024)
CPU_HALF_CUT = replace(CPU_CUT, widest=2048)
CPU_GRAIN = Grain(smallest=128, largest=2048)
LONGEST_MASK = 4096  # keys of one tile that needs a mask: what is evaluated stays O(tile)


class Tiling(ABC):
    """Tiles of the queries of ring rank `rank` against the keys of ring rank `source`."""

    trained: tuple[Tensor, ...] = ()  # inputs of the mask that need gradients

    device: torch.device

    @abstractmethod
    def tasks(self, rank: int, source: int) -> tuple[TileTask, ...]:
        """Each visible pair is in one."""

    def halves(self, rank: int) -> Halves:
        """The tiles of a rank's queries against its own keys, in two parts."""
        if rank not in self._halves:
            self._halves[rank] = halves(
                self.tasks(rank, rank), lambda found: _for_kernels(found, self.device)
            )
        return self._halves[rank]

    @cached_property
    def _halves(self) -> dict[int, Halves]:
        return {}

    def gradients(
        self,
        task: TileTask,
        rank: int,
        source: int,
        heads: Sequence[int],
        cotangent: Tensor,
        scores: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """What the cotangent [B, H, rows, columns] of one tile's mask, or of what its `scores`
        become, gives to `trained`."""
        return ()

    def travel(self) -> Travel | None:
        """The keys that travel, the same on all ranks of the ring; None: whole blocks do."""
        return None

    @abstractmethod
    def mask(self, task: TileTask, rank: int, source: int, heads: Sequence[int]) -> TileMask:
        """Of a PARTIAL tile: boolean (True is seen) or additive, broadcastable to
        [B, H, rows, columns]. `heads`: for each of this rank's, one of the mask."""

    @property
    def modifies(self) -> bool:
        """Whether scores become others, in all tiles; `mask` says how."""
        return False


@dataclass(frozen=True)
class StaticTiling(Tiling):
    """A mask that is a rule on positions. `real` of `length` tokens are not padding. `dtype`: of
    the queries that it is cut for."""

    rule: Mask
    layout: SequenceLayout
    length: int
    device: torch.device
    real: int | None = None
    dtype: torch.dtype = torch.float32

    def tasks(self, rank: int, source: int) -> tuple[TileTask, ...]:
        if (rank, source) not in self._known:
            queries, keys = self._ranges(rank), self._ranges(source)
            keys = keys if self.real is None else before(keys, self.real)
            found = tiles(self.rule, queries, keys, self._cut)
            self._known[rank, source] = _for_kernels(found, self.device)
        return self._known[rank, source]

    @property
    def _cut(self) -> BandCut:
        if self.device.type != "cpu":
            return PLAIN
        return CPU_CUT if self.dtype.itemsize >= 4 else CPU_HALF_CUT

    def travel(self) -> Travel | None:
        return self._travel

    @cached_property
    def _travel(self) -> Travel | None:
        return travel_of(self.rule, self.layout, self.length)

    @cached_property
    def _known(self) -> dict[tuple[int, int], tuple[TileTask, ...]]:
        return {}

    def mask(self, task: TileTask, rank: int, source: int, heads: Sequence[int]) -> TileMask:
        q = slice_ranges(self._ranges(rank), task.q_start, task.q_stop)
        k = slice_ranges(self._ranges(source), task.k_start, task.k_stop)
        return self._mask.of(q, k)

    @cached_property
    def _mask(self) -> RuleMask:
        return RuleMask(self.rule, self.device)

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
        self._trained_at = tuple(i for i in mask.trained if leaves[i].requires_grad)
        # Held as they are: the attentions hand their gradients to these.
        self.trained = tuple(leaves[i] for i in self._trained_at)
        self.device = device
        self._layout = layout
        self._length = length
        self._real = length if real is None else real
        self._tasks: dict[tuple[int, int], tuple[TileTask, ...]] = {}
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}
        self._best: dict[int, Tensor | None] = {}
        self._lock = threading.RLock()  # autograd may run backward in other threads

    def tasks(self, rank: int, source: int) -> tuple[TileTask, ...]:
        with self._lock:
            if (rank, source) not in self._tasks:
                self._tasks[rank, source] = self._made(rank, source)
            return self._tasks[rank, source]

    def travel(self) -> Travel | None:
        with self._lock:
            return self._travel

    @cached_property
    def _travel(self) -> Travel | None:
        """Every rank has all inputs of the mask, so each knows what all others see."""
        keys, ranks = self._length // self._layout.ring, range(self._layout.ring)
        block = block_size(keys)

        def seen(blocks: list[bool]) -> Intervals:
            runs = (range(i * block, min((i + 1) * block, keys)) for i, s in enumerate(blocks) if s)
            return united(runs)

        rows = [(~self._classified(rank)[0]).any(0).tolist() for rank in ranks]
        travel = Travel(keys, tuple(tuple(seen(row[source]) for source in ranks) for row in rows))
        return travel if travel.saves() else None

    @property
    def modifies(self) -> bool:
        return self._mask.mod is not None

    def mask(self, task: TileTask, rank: int, source: int, heads: Sequence[int]) -> TileMask:
        rows = slice(task.q_start, task.q_stop)
        q = self._positions(rank)[rows]
        k = self._positions(source)[task.k_start : task.k_stop]
        leaves = [_of_heads(x, heads) for x in self._leaves]
        values = self._mask.evaluate(leaves, q, k)
        padded = self._is_padding(source)
        if padded is not None:
            hidden = -torch.inf if self._mask.additive else False
            values = values.masked_fill(padded[task.k_start : task.k_stop], hidden)
        if self.modifies:
            return ScoreTile(values, self._mask, leaves, q, k)
        best = self._best.get(rank)
        if best is None:
            return values
        best = _of_heads(best, heads)[:, :, rows]
        return HiddenRows.lifted(values, best, lambda: self._mask.fills(leaves, q, k))

    def gradients(
        self,
        task: TileTask,
        rank: int,
        source: int,
        heads: Sequence[int],
        cotangent: Tensor,
        scores: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        q = self._positions(rank)[task.q_start : task.q_stop]
        k = self._positions(source)[task.k_start : task.k_stop]
        leaves = list(self._leaves)
        inputs = [leaves[i].clone().requires_grad_() for i in self._trained_at]
        for at, leaf in zip(self._trained_at, inputs, strict=True):
            leaves[at] = leaf
        with torch.enable_grad():
            own = [_of_heads(x, heads) for x in leaves]
            if scores is None:
                mask = self._mask.evaluate(own, q, k)
            else:
                mask = self._mask.modified(scores, own, q, k)
        if not mask.requires_grad:  # comparisons pass no gradient on
            return tuple(torch.zeros_like(x) for x in inputs)
        cotangent = cotangent.sum_to_size(mask.shape).to(mask.dtype)
        return torch.autograd.grad(mask, inputs, cotangent, materialize_grads=True)

    def _positions(self, rank: int) -> Tensor:
        """Of all tokens of a ring rank; padding stands where the last token is."""
        own = positions(self._layout.ring_ranges(self._length, rank), self.device)
        return own if self._real == self._length else own.clamp_(max=self._real - 1)

    def _is_padding(self, rank: int) -> Tensor | None:
        """Which tokens of a ring rank are padding; None where none is."""
        if self._real == self._length:
            return None
        own = positions(self._layout.ring_ranges(self._length, rank), self.device)
        return own >= self._real

    def _classified(self, rank: int) -> tuple[Tensor, Tensor]:
        """Which blocks [query blocks, ring rank, key blocks] nobody sees, and which all see."""
        if rank not in self._blocks:
            self._blocks[rank] = self._bounded(rank)
        return self._blocks[rank]

    def _bounded(self, rank: int) -> tuple[Tensor, Tensor]:
        q, ring = self._positions(rank), self._layout.ring
        block = block_size(len(q))
        # The blocks of a rank end with it: the last is filled up with its last position.
        each = (self._positions(source) for source in range(ring))
        k = torch.cat([torch.cat((p, p[-1:].expand(-len(p) % block))) for p in each])
        grid = bounds(self._mask, self._leaves, q, k, (block, block))
        low, high = (
            x.unflatten(1, (ring, -1)) for x in (grid.low.amin((0, 1)), grid.high.amax((0, 1)))
        )
        if not self._mask.additive:
            return self._without_padding(high == 0, low == 1, block)
        empty, full = high <= self._mask.hidden, (low == 0) & (high == 0)
        if rank not in self._best:
            self._best[rank] = self._best_of_hidden(q)
        best = self._best[rank]
        if best is not None:
            # All keys count for a row that a finite number hides.
            settled = best.isneginf() | best.isposinf()
            empty = empty & _all_per_block(settled.all(0).all(0), block)[:, None, None]
        return self._without_padding(empty, full, block)

    def _without_padding(self, empty: Tensor, full: Tensor, block: int) -> tuple[Tensor, Tensor]:
        if self._real == self._length:
            return empty, full
        padded = [self._is_padding(source) for source in range(self._layout.ring)]
        whole = torch.stack([_all_per_block(p, block) for p in padded if p is not None])
        some = ~torch.stack([_all_per_block(~p, block) for p in padded if p is not None])
        return empty | whole, full & ~some

    def _made(self, rank: int, source: int) -> tuple[TileTask, ...]:
        q, k = self._positions(rank), self._positions(source)
        block = block_size(len(q))
        empty, full = (x[:, source] for x in self._classified(rank))
        padded = self._is_padding(source)
        kinds = torch.full(empty.shape, PARTIAL, dtype=torch.int8)
        kinds[empty.cpu()] = EMPTY
        if not self.trained and not self.modifies:  # a bias of zeros has a gradient too
            kinds[full.cpu()] = FULL
            for index in range(min(kinds.shape)):
                rows = slice(index * block, (index + 1) * block)
                unpadded = padded is None or not bool(padded[rows].any())
                if (
                    kinds[index, index] == PARTIAL
                    and unpadded
                    and self._is_triangle(q[rows], k[rows])
                ):
                    kinds[index, index] = CAUSAL
        found = tasks_of(kinds, len(q), len(k), block)
        found = tuple(part for task in found for part in _short(task))
        return _for_kernels(found, self.device)

    def _is_triangle(self, q: Tensor, k: Tensor) -> bool:
        """Whether each query sees exactly the keys up to its own place."""
        if len(q) != len(k):
            return False
        values = self._mask.evaluate(self._leaves, q, k)
        seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril()
        if self._mask.additive:
            hidden = values <= self._mask.hidden
            return bool(torch.where(seen, values == 0, hidden).all())
        return bool((values == seen).all())

    def _best_of_hidden(self, q: Tensor) -> Tensor | None:
        """[B or 1, H or 1, q]: the largest mask value of rows that see nothing, inf for others.

        None where no row is hidden by finite numbers alone.
        """
        hidden = self._mask.hidden
        if not self._mask.additive or hidden == -torch.inf or self._mask.sinks:
            return None
        # Nearly every token sees itself.
        best = self._mask.diagonal(self._leaves, q).double()
        shape = torch.broadcast_shapes(
            best.shape, (1, 1, len(q)), *((*shape, 1) for shape in self._samples_and_heads())
        )
        best, block = best.expand(shape).clone(), block_size(len(q))
        for start in range(0, len(q), block):
            rows = slice(start, start + block)
            if bool((best[:, :, rows] <= hidden / 2).any()):
                best[:, :, rows] = self._largest(q[rows], best[:, :, rows])
        best = best.masked_fill(best > hidden / 2, torch.inf)
        return best if bool(best.isfinite().any()) else None

    def _samples_and_heads(self) -> list[tuple[int, int]]:
        return [
            (1 if index in self._mask.tables else x.shape[0], x.shape[1])
            for index, x in enumerate(self._leaves)
        ]

    def _largest(self, q: Tensor, best: Tensor) -> Tensor:
        """The largest mask value of each row, or some value that says that it sees a key."""
        k = torch.arange(self._real, device=q.device)
        block = block_size(self._length)
        grid = bounds(self._mask, self._leaves, q, k, (1, block))
        best = torch.maximum(best, grid.low.amax(-1))
        for index in range(grid.high.shape[-1]):
            better = (grid.high[..., index] > best) & (best <= self._mask.hidden / 2)
            if bool(better.any()):
                part = k[index * block : (index + 1) * block]
                found = self._mask.evaluate(self._leaves, q, part).double().amax(-1)
                best = torch.maximum(best, found)
        return best


def _for_kernels(tasks: tuple[TileTask, ...], device: torch.device) -> tuple[TileTask, ...]:
    return cut(tasks, CPU_GRAIN) if device.type == "cpu" else tasks


def _of_heads(x: Tensor, heads: Sequence[int]) -> Tensor:
    return of_heads(x, heads, 1) if x.shape[1] > 1 else x


def _all_per_block(rows: Tensor, block: int) -> Tensor:
    return torch.stack([part.all() for part in rows.split(block)])


def _short(task: TileTask) -> list[TileTask]:
    """A tile that needs a mask, in pieces whose masks are small."""
    if task.kind is not Tile.PARTIAL:
        return [task]
    starts = range(task.k_start, task.k_stop, LONGEST_MASK)
    return [
        replace(task, k_start=start, k_stop=min(start + LONGEST_MASK, task.k_stop))
        for start in starts
    ]


def before(ranges: Sequence[range], length: int) -> tuple[range, ...]:
    """The positions below `length`: of ascending ranges the first ones."""
    parts = (range(r.start, min(r.stop, length), r.step) for r in ranges)
    return tuple(part for part in parts if len(part))
