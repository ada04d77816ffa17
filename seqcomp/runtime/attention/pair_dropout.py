"""Dropout of attention's probabilities, keyed by (sample, head, query, key) of the whole.

Tiles of a ring, heads after a Ulysses exchange and heads cut by a tensor axis each make their part
of one mask. No fused kernel can, so "math" computes where there is dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seqcomp.layout.masks import TileTask
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.attention.heads import of_heads
from seqcomp.runtime.positions import positions
from seqcomp.runtime.random import keep_mask, scale_of


@dataclass(frozen=True, eq=False)
class PairDropout:
    """What this rank's queries and heads are in probabilities [B, H, queries, keys] of the whole.

    key: int64 [2], see runtime/random.py. samples [b], heads [h], queries [q]: places in the
    whole, int64; sizes: the four of the whole.
    """

    key: Tensor
    p: float
    samples: Tensor
    heads: Tensor
    queries: Tensor
    sizes: tuple[int, int, int, int]

    @staticmethod
    def whole(key: Tensor, p: float, sizes: tuple[int, int, int, int]) -> PairDropout:
        """Of a rank that has everything."""
        samples, heads, queries = (torch.arange(n, device=key.device) for n in sizes[:3])
        return PairDropout(key, p, samples, heads, queries, sizes)

    def tile(self, heads: Sequence[int], queries: Tensor, keys: Tensor) -> TileDropout:
        """heads: which of this rank's; queries, keys: positions in the whole."""
        own = of_heads(self.heads, heads, 0)
        return TileDropout(self.key, self.p, (self.samples, own, queries, keys), self.sizes)

    def all_keys(self) -> TileDropout:
        """This rank's queries and heads against every key."""
        keys = torch.arange(self.sizes[3], device=self.key.device)
        return self.tile(range(len(self.heads)), self.queries, keys)


@dataclass(frozen=True, eq=False)
class TileDropout:
    """The dropout of one tile. `index`: its samples, heads, queries and keys in the whole."""

    key: Tensor
    p: float
    index: tuple[Tensor, Tensor, Tensor, Tensor]
    sizes: tuple[int, int, int, int]

    def part(self, rows: slice, columns: slice) -> TileDropout:
        samples, heads, queries, keys = self.index
        return replace(self, index=(samples, heads, queries[rows], keys[columns]))

    def factors(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """[B, H, rows, keys]: 0 where a probability is dropped, 1 / (1 - p) elsewhere."""
        samples, heads, queries, keys = self.index
        kept = keep_mask(self.key, (samples, heads, queries[rows], keys), self.sizes, self.p)
        return kept.to(dtype).mul_(scale_of(self.p))


@dataclass(frozen=True, eq=False)
class RingDropout:
    """`pairs` where the tokens of the whole, padded to `length`, are dealt out over a ring."""

    pairs: PairDropout
    layout: SequenceLayout
    length: int

    def tile(
        self, task: TileTask, rank: int, source: int, heads: Sequence[int], *, reverse: bool
    ) -> TileDropout:
        """Of a task; with queries and keys from the last to the first where `reverse`."""
        device = self.pairs.key.device
        q = positions(self.layout.ring_ranges(self.length, rank), device)
        k = positions(self.layout.ring_ranges(self.length, source), device)
        q, k = q[task.q_start : task.q_stop], k[task.k_start : task.k_stop]
        if reverse:
            q, k = q.flip(0), k.flip(0)
        return self.pairs.tile(heads, q, k)
