"""The Ulysses exchange: shards of tokens with all heads <-> all tokens of some heads.

Jacobs et al., DeepSpeed Ulysses, 2023. Queries, keys and values travel in one all-to-all. With
more ranks than KV heads each KV head is sent to the P / Hkv ranks whose queries need it, and the
sum of their gradients comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from seqcomp.runtime.comm import Communicator
from seqcomp.runtime.traffic import Phase


def to_heads(
    tensors: Sequence[Tensor], comm: Communicator, *, phase: Phase = "forward", label: str = ""
) -> list[Tensor]:
    """Each [B, H, s, d] -> [B, max(H/P, 1), P*s, d] contiguous; rank r gets the r-th heads.

    H must divide P or be divided by it; of H < P heads rank r gets head r // (P/H).
    """
    size = comm.size
    for x in tensors:
        heads = x.shape[1]
        assert heads % size == 0 or size % heads == 0, f"{heads} heads over {size} ranks"
    rows = [
        x.repeat_interleave(max(size // x.shape[1], 1), dim=1).unflatten(1, (size, -1))
        if x.shape[1] < size
        else x.unflatten(1, (size, -1))
        for x in tensors
    ]
    received = _exchange([x.movedim(1, 0) for x in rows], comm, phase, label)
    return [x.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous() for x in received]


def to_tokens(
    tensors: Sequence[Tensor],
    heads: Sequence[int],
    comm: Communicator,
    *,
    phase: Phase = "forward",
    label: str = "",
) -> list[Tensor]:
    """Each [B, h, P*s, d] -> [B, H, s, d], the inverse of ``to_heads`` for H = ``heads``.

    Where H < P, the P/H copies of a head are added up.
    """
    rows = [x.unflatten(2, (comm.size, -1)).movedim(2, 0) for x in tensors]
    received = _exchange(rows, comm, phase, label)
    joined = [x.movedim(0, 1).flatten(1, 2) for x in received]
    return [
        x if x.shape[1] == wanted else x.unflatten(1, (wanted, -1)).sum(2, dtype=x.dtype)
        for x, wanted in zip(joined, heads, strict=True)
    ]


def _exchange(rows: Sequence[Tensor], comm: Communicator, phase: Phase, label: str) -> list[Tensor]:
    """All-to-all of several [P, ...] tensors of one dtype in one buffer."""
    sizes = [prod(x.shape[1:]) for x in rows]
    packed = torch.cat([x.reshape(comm.size, -1) for x in rows], dim=1)
    received = comm.all_to_all(packed, phase=phase, label=label)
    parts = received.split(sizes, dim=1)
    return [part.unflatten(1, x.shape[1:]) for part, x in zip(parts, rows, strict=True)]
