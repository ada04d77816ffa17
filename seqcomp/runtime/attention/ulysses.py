"""The Ulysses exchange: shards of tokens with all heads <-> all tokens of some heads.

Jacobs et al., DeepSpeed Ulysses, 2023. Queries, keys and values travel in one all-to-all. A KV head
is sent to every rank whose queries need it, and the sum of their gradients comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from seqcomp.layout.heads import ZERO
from seqcomp.runtime.comm import Communicator
from seqcomp.runtime.traffic import Phase


def to_heads(
    tensors: Sequence[Tensor],
    slots: Sequence[Sequence[int]],
    comm: Communicator,
    *,
    phase: Phase = "forward",
    label: str = "",
) -> list[Tensor]:
    """Each [B, H, s, d] -> [B, n, P*s, d] contiguous; rank r gets the r-th n of its ``slots``.

    slots: for each tensor P*n of its heads, ``ZERO`` for one of zeros (see layout/heads.py).
    """
    rows = [
        _taken(x, heads).unflatten(1, (comm.size, -1)).movedim(1, 0)
        for x, heads in zip(tensors, slots, strict=True)
    ]
    received = _exchange(rows, comm, phase, label)
    return [x.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous() for x in received]


def to_tokens(
    tensors: Sequence[Tensor],
    slots: Sequence[Sequence[int]],
    comm: Communicator,
    *,
    phase: Phase = "forward",
    label: str = "",
) -> list[Tensor]:
    """Each [B, n, P*s, d] -> [B, H, s, d], the inverse of ``to_heads`` with the same slots.

    The copies of a head are added up; what comes from slots of zeros is dropped.
    """
    rows = [x.unflatten(2, (comm.size, -1)).movedim(2, 0) for x in tensors]
    received = _exchange(rows, comm, phase, label)
    joined = [x.movedim(0, 1).flatten(1, 2) for x in received]
    return [_added(x, heads) for x, heads in zip(joined, slots, strict=True)]


def _taken(x: Tensor, slots: Sequence[int]) -> Tensor:
    """[B, H, s, d] -> [B, len(slots), s, d]."""
    places = [place for place, head in enumerate(slots) if head != ZERO]
    heads = [slots[place] for place in places]
    if heads != list(range(x.shape[1])):
        x = x.index_select(1, torch.tensor(heads, device=x.device))
    if len(places) == len(slots):
        return x
    padded = x.new_zeros((x.shape[0], len(slots), *x.shape[2:]))
    return padded.index_copy_(1, torch.tensor(places, device=x.device), x)


def _added(x: Tensor, slots: Sequence[int]) -> Tensor:
    """[B, len(slots), s, d] -> [B, H, s, d]: each head is the sum of its slots."""
    places: dict[int, list[int]] = {}
    for place, head in enumerate(slots):
        if head != ZERO:
            places.setdefault(head, []).append(place)
    copies = max(map(len, places.values()))
    table = [p for own in places.values() for p in (*own, *[ZERO] * (copies - len(own)))]
    x = _taken(x, table)
    return x if copies == 1 else x.unflatten(1, (-1, copies)).sum(2, dtype=x.dtype)


def _exchange(rows: Sequence[Tensor], comm: Communicator, phase: Phase, label: str) -> list[Tensor]:
    """All-to-all of several [P, ...] tensors of one dtype in one buffer."""
    sizes = [prod(x.shape[1:]) for x in rows]
    packed = torch.cat([x.reshape(comm.size, -1) for x in rows], dim=1)
    received = comm.all_to_all(packed, phase=phase, label=label)
    parts = received.split(sizes, dim=1)
    return [part.unflatten(1, x.shape[1:]) for part, x in zip(parts, rows, strict=True)]
