"""Parts as torch.chunk deals them out; unequal ones travel padded to the largest."""

from __future__ import annotations

import torch
from torch import Tensor

from seqcomp.layout.parts import part, part_size
from seqcomp.runtime.comm import Communicator


def pad_to(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros behind it along `dim`, `size` in all; the backward cuts them off."""
    pads = [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, size - x.shape[dim]]
    return torch.nn.functional.pad(x, pads)


def pad_part(x: Tensor, dim: int, size: int, comm: Communicator) -> Tensor:
    """This rank's part [..., n, ...] of a dim of global `size`, in the size of the largest part."""
    return pad_to(x, dim, part_size(size, comm.size))


def own_part(x: Tensor, dim: int, size: int, comm: Communicator) -> Tensor:
    """This rank's part of a whole dim of `size`, as a view. The backward pads with zeros."""
    own = part(size, comm.size, comm.rank)
    return x.narrow(dim, own.start, len(own))
