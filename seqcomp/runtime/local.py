"""This rank's plain tensor behind a DTensor parameter, and its gradient as a DTensor again.

DTensor's own ``to_local`` derives the gradient's layout anew for each use; that of a parameter's
gradient is the parameter's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor


def local_part(x: Tensor) -> Tensor:
    """A DTensor's local tensor, with its gradient; any other tensor as it is."""
    if not isinstance(x, DTensor):
        return x
    if torch.compiler.is_dynamo_compiling():
        return x.to_local()  # what compilers know, and what it costs is paid at the trace
    part: Tensor = _LocalPart.apply(x) if x.requires_grad else x._local_tensor
    return part


def bare(x: Tensor) -> Tensor:
    """The same without a gradient, as a tensor of its own: autograd marks what it is given."""
    return x._local_tensor.view_as(x._local_tensor) if isinstance(x, DTensor) else x


class Placed:
    """How a parameter is placed, so that its gradient can be placed alike."""

    def __init__(self, x: Tensor) -> None:
        self._spec = x._spec if isinstance(x, DTensor) else None
        self._local = x._local_tensor if isinstance(x, DTensor) else None

    def __call__(self, gradient: Tensor) -> Tensor:
        """A local gradient, as a DTensor where the parameter is one."""
        if self._spec is None or self._local is None:
            return gradient
        if gradient.stride() != self._local.stride():
            gradient = torch.empty_like(self._local).copy_(gradient)
        return DTensor(gradient, copy.copy(self._spec), requires_grad=False)


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.placed = Placed(x)
        return bare(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        placed: Placed = ctx.placed
        return placed(gradient)
