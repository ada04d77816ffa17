"""Attention of CPUs in batched matrix products, for masks and for values of another head dim; the
interface is that of `kernels`.

The flash kernel of CPUs skips keys in blocks of 512, too coarse for a narrow band, and what it
returns is added up in another pass over memory. Here a few rows at a time meet the keys they see,
so that scores stay in the cache, and the products add to dk and dv themselves. Exponentials are of
base 2: torch computes these in less than half the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from seqcomp.runtime.attention.band_mask import BandMask, bias_of
from seqcomp.runtime.attention.bias import additive, finite

LOG2E = 1 / math.log(2)

PIECE_BYTES = 6 * 2**20
"""Of the scores of some heads for a few rows."""

STRIP = 64
"""Rows of a band: fewer keys are hidden from some of them than from more."""

Grads = tuple[Tensor, Tensor, Tensor]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | BandMask | None = None,
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    out = q.new_empty(shape).transpose(1, 2)  # the heads of a token side by side
    top, total = (q.new_empty(*q.shape[:3], 1) for _ in range(2))
    scores, lowest = q.new_empty(0), torch.finfo(q.dtype).min
    with torch.autocast("cpu", enabled=False):
        for piece in _pieces(q, k, mask, causal):
            own_out, own_top, own_total = (piece.rows_of(x) for x in (out, top, total))
            if piece.sees_nothing:
                own_out.zero_()
                own_top.fill_(lowest)
                own_total.zero_()
                continue
            weights = piece.scores(q, k, scale, scores)
            found_top = weights.amax(-1, keepdim=True).clamp_(min=lowest)
            weights.sub_(found_top).exp2_()
            own_top.copy_(piece.by_head(found_top))
            own_total.copy_(piece.by_head(weights.sum(-1, keepdim=True)))
            own_out.copy_(piece.by_head(torch.bmm(weights, piece.keys_of(v))))
        lse = total.log2().add_(top).div_(LOG2E).squeeze(-1)
        # At least 1 where anything is seen: the weight of the largest score.
        return out.div_(total.clamp_(min=1.0)), lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | BandMask | None = None,
    into: Grads | None = None,
) -> Grads:
    """``into``: dq, dk, dv of these queries and keys, to which it adds; None: zeros."""
    dq, dk, dv = into or (torch.zeros_like(x) for x in (q, k, v))
    scores, slopes = q.new_empty(0), q.new_empty(0)
    with torch.autocast("cpu", enabled=False):
        shift = finite(lse).mul_(LOG2E).unsqueeze(-1)
        delta = (dout * out).sum(-1, keepdim=True)
        for piece in _pieces(q, k, mask, causal):
            if piece.sees_nothing:
                continue
            rows = (piece.grouped(x) for x in (q, dout, shift, delta))
            own_q, own_dout, own_shift, own_delta = rows
            weights = piece.scores(q, k, scale, scores).sub_(own_shift).exp2_()
            piece.keys_of(dv).baddbmm_(weights.mT, own_dout)
            slopes.resize_(weights.shape)
            torch.bmm(own_dout, piece.keys_of(v).mT, out=slopes)
            slopes.sub_(own_delta).mul_(weights)
            piece.keys_of(dk).baddbmm_(slopes.mT, own_q, alpha=scale)
            own_dq = piece.by_head(torch.bmm(slopes, piece.keys_of(k)))
            piece.rows_of(dq).add_(own_dq, alpha=scale)
    return dq, dk, dv


@dataclass(frozen=True)
class _Piece:
    """Some rows and keys of some KV heads of one sample, and of the query heads that share these.

    Products take [heads, group * rows, d] and [heads, keys, d].
    """

    sample: int
    heads: slice
    group: int
    rows: slice
    keys: slice
    mask: Tensor | BandMask | None
    """Of the piece; a tensor broadcasts to [heads, group, rows, keys]."""

    @property
    def sees_nothing(self) -> bool:
        return self.keys.start == self.keys.stop

    def rows_of(self, x: Tensor) -> Tensor:
        """[B, Hq, Sq, ...] -> [heads * group, rows, ...]."""
        return x[self.sample, _query_heads(self.heads, self.group), self.rows]

    def by_head(self, x: Tensor) -> Tensor:
        """[heads, group * rows, ...] -> [heads * group, rows, ...]."""
        return x.unflatten(1, (self.group, -1)).flatten(0, 1)

    def grouped(self, x: Tensor) -> Tensor:
        """[B, Hq, Sq, ...] -> [heads, group * rows, ...]; a view where the group is of one."""
        return self.rows_of(x).unflatten(0, (-1, self.group)).flatten(1, 2)

    def keys_of(self, x: Tensor) -> Tensor:
        """[B, Hkv, Sk, d] -> [heads, keys, d]."""
        return x[self.sample, self.heads, self.keys]

    def scores(self, q: Tensor, k: Tensor, scale: float, room: Tensor) -> Tensor:
        """Masked, times log2(e), in ``room``."""
        own, keys = self.grouped(q), self.keys_of(k)
        room.resize_(own.shape[0], own.shape[1], keys.shape[1])
        torch.baddbmm(room, own, keys.mT, beta=0, alpha=scale * LOG2E, out=room)
        by_head = room.unflatten(1, (self.group, -1))
        if isinstance(self.mask, BandMask):
            for columns, bias in self.mask.corners():
                by_head[..., columns].add_(bias)
        elif self.mask is not None:
            by_head.add_(self.mask, alpha=LOG2E)
        return room


def _pieces(q: Tensor, k: Tensor, mask: Tensor | BandMask | None, causal: bool) -> Iterator[_Piece]:
    group = q.shape[1] // k.shape[1]
    if causal:
        assert mask is None, "causal is for whole triangles"
        mask = BandMask(-q.shape[2], 0, q.shape[2], k.shape[2], partial(bias_of, q.device))
    for rows, keys, part in _parts(q, k, mask):
        step = max(1, _room(q, k, keys.stop - keys.start) // (rows.stop - rows.start))
        for sample in range(k.shape[0]):
            for head in range(0, k.shape[1], step):
                heads = slice(head, min(head + step, k.shape[1]))
                own = _of_heads(part, sample, heads, group) if isinstance(part, Tensor) else part
                yield _Piece(sample, heads, group, rows, keys, own)


def _parts(
    q: Tensor, k: Tensor, mask: Tensor | BandMask | None
) -> Iterator[tuple[slice, slice, Tensor | BandMask | None]]:
    """(rows, keys, mask) such that the scores of one head are not too many."""
    if isinstance(mask, BandMask):
        most = min(mask.columns, mask.up - mask.down + STRIP)
        yield from mask.strips(max(1, min(STRIP, _room(q, k, most))))
        return
    rows, keys = q.shape[2], slice(0, k.shape[2])
    bias = None if mask is None else additive(mask, q, k)
    step = max(1, _room(q, k, k.shape[2]))
    for start in range(0, rows, step):
        own = slice(start, min(start + step, rows))
        yield own, keys, None if bias is None else bias[:, :, own]


def _room(q: Tensor, k: Tensor, keys: int) -> int:
    """Rows of one KV head with so many keys that PIECE_BYTES hold."""
    return PIECE_BYTES // max(1, q.shape[1] // k.shape[1] * keys * q.element_size())


def _of_heads(bias: Tensor, sample: int, heads: slice, group: int) -> Tensor:
    """[B or 1, Hq or 1, ...] -> [heads or 1, group or 1, ...] of one sample."""
    bias = bias[sample if bias.shape[0] > 1 else 0]
    if bias.shape[0] == 1:
        return bias.unsqueeze(0)
    return bias[_query_heads(heads, group)].unflatten(0, (-1, group))


def _query_heads(heads: slice, group: int) -> slice:
    return slice(heads.start * group, heads.stop * group)
