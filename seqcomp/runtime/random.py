"""Dropout whose mask is a function of what is dropped, not of who drops it or when.

Whether an element is kept is a hash of (seed of the call, number of the dropout, index of the
element in the whole value). So a mask is the same however the value is cut over ranks, on every
rank that has a copy, in a recomputation, and on any device. The hash is SplitMix64 (Steele, Lea and
Flood, 2014) with a second key added between its rounds, so that two dropouts never see shifted
parts of one stream. All arithmetic is modulo 2^64 in int64 tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_CPU_CHUNK, _CHUNK = (
    2**15,
    2**22,
)  # elements: of one core and its cache; to keep an accelerator busy


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """A number in [0, 2^62) from torch's CPU generator, which moves on."""
    return int(torch.randint(2**62, (), generator=generator, dtype=torch.int64, device="cpu"))


def keys_of(seed: int, count: int, device: torch.device) -> Tensor:
    """int64 [count, 2]: the keys of each dropout of one call."""
    state = torch.full((), seed, dtype=torch.int64)
    state = _mixed(state * _GOLDEN, 0)
    steps = torch.arange(1, 2 * count + 1, dtype=torch.int64)
    return _mixed(state + steps * _GOLDEN, 0).view(count, 2).to(device, non_blocking=True)


def keep_mask(key: Tensor, index: Sequence[Tensor], sizes: Sequence[int], p: float) -> Tensor:
    """Boolean [len(i) for i in index]: which elements stay; each is dropped with probability p.

    key: int64 [2]. index: for each dim the places in the whole value of those asked for, int64
    [n]; sizes: of the whole value.
    """
    kept: Tensor = torch.ops.seqcomp.keep_mask(key, list(index), list(sizes), p)
    return kept


# One operation for whoever traces: inductor takes products of an arange with a number for indices,
# which must not wrap around.
torch.library.define(
    "seqcomp::keep_mask", "(Tensor key, Tensor[] index, SymInt[] sizes, float p) -> Tensor"
)


@torch.library.register_fake("seqcomp::keep_mask")
def _imagined(key: Tensor, index: list[Tensor], sizes: list[int], p: float) -> Tensor:
    return key.new_empty([places.shape[0] for places in index], dtype=torch.bool)


def computed_mask(key: Tensor, index: list[Tensor], sizes: list[int], p: float) -> Tensor:
    """What `keep_mask` gives, in operations of torch."""
    shape = [places.shape[0] for places in index]
    if p >= 1:
        return torch.zeros(shape, dtype=torch.bool, device=key.device)
    rows, stride = key[:1], math.prod(sizes[1:])
    for places, size in zip(index[:-1], sizes[1:], strict=True):
        rows = (rows.unsqueeze(1) + places * stride * _GOLDEN).flatten()
        stride //= max(size, 1)
    columns = index[-1] * _GOLDEN if index else torch.zeros_like(key[:1])
    below = min(-(2**63) + round((1 - p) * 2**64), 2**63 - 1)
    out = torch.empty((len(rows), len(columns)), dtype=torch.bool, device=key.device)
    most = _CPU_CHUNK if key.device.type == "cpu" else _CHUNK
    width = min(len(columns), most)
    height = max(most // max(width, 1), 1)
    for top in range(0, len(rows), height):
        for left in range(0, len(columns), max(width, 1)):
            part = (slice(top, top + height), slice(left, left + width))
            counter = rows[part[0]].unsqueeze(1) + columns[part[1]]
            torch.lt(_mixed(counter, key[1]), below, out=out[part])
    return out.view(shape)


torch.library.impl("seqcomp::keep_mask", "CompositeExplicitAutograd", computed_mask)


def dropout(
    x: Tensor, key: Tensor, index: Sequence[Tensor], sizes: Sequence[int], p: float
) -> Tensor:
    """x with some elements 0 and the others times 1 / (1 - p).

    index, sizes: as in `keep_mask`, of the first dims of x; the rest of the dims share a fate.
    Saves the mask, one byte for each, as torch's own does: hashing again in backward would cost
    more than the byte, and a checkpoint around it saves neither.
    """
    keep = keep_mask(key, index, sizes, p)
    assert keep.shape == x.shape[: keep.dim()], f"a mask {list(keep.shape)} for {list(x.shape)}"
    keep = keep.view(*keep.shape, *(1,) * (x.dim() - keep.dim()))
    return torch.where(keep, x * scale_of(p), 0.0)


def scale_of(p: float) -> float:
    """What stays is multiplied by."""
    return 1.0 / (1.0 - p) if p < 1 else 0.0


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _mixed(z: Tensor, key: Tensor | int) -> Tensor:
    """The hash of each counter, in place."""
    z ^= _shifted(z, 30)
    z *= _FIRST
    z += key
    z ^= _shifted(z, 27)
    z *= _SECOND
    z ^= _shifted(z, 31)
    return z


def _shifted(z: Tensor, bits: int) -> Tensor:
    """To the right, without the sign."""
    high = z >> bits
    high &= 2 ** (64 - bits) - 1
    return high
