"""Parameters that a tensor axis cuts: DTensors with the original names, shapes and ties."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from seqcomp.layout.parts import part
from seqcomp.lowering.blanks import blank_like, replaced
from seqcomp.runtime.comm import Communicator, RankContext
from seqcomp.runtime.uneven import pad_part

Value = TypeVar("Value")


@dataclass(frozen=True)
class Cut:
    """Which dim of a parameter the axis divides."""

    dim: int
    axis: str


class CutParameters:
    """Replaces the parameters of one module by this rank's parts, once, and back again.

    On process groups every parameter becomes a DTensor on the tensor axis (cut ones Shard, all
    others Replicate), so that optimizers and clip_grad_norm_ see one kind. On thread ranks, which
    have no DeviceMesh, a cut parameter is a plain tensor with the local shape.
    """

    def __init__(
        self, module: nn.Module, context: RankContext, axis: str, mesh: DeviceMesh | None = None
    ):
        self._module = module
        self._context = context
        self._axis = axis
        self._mesh = mesh if mesh is not None else context.device_mesh([(axis,)])
        self._cuts: Mapping[str, Cut] | None = None
        self._shapes: dict[str, torch.Size] = {}  # of the cut ones, whole

    @property
    def cuts(self) -> Mapping[str, Cut] | None:
        """The cuts in effect; None before `apply`."""
        return self._cuts

    def apply(self, cuts: Mapping[str, Cut]) -> None:
        """Cuts the parameters. `cuts` has one entry per tensor, by any of its names."""
        assert self._cuts is None, "already cut"
        comm = self._context.comm((self._axis,))
        by_tensor = self._by_tensor(cuts)
        self._shapes = {name: self._module.get_parameter(name).shape for name in cuts}
        made: dict[int, nn.Parameter] = {}
        for owner, name, parameter in self._places():
            cut = by_tensor.get(id(parameter))
            if id(parameter) not in made:
                made[id(parameter)] = self._part(parameter, cut, comm)
            owner._parameters[name] = made[id(parameter)]
        self._cuts = dict(cuts)

    def _part(self, parameter: nn.Parameter, cut: Cut | None, comm: Communicator) -> nn.Parameter:
        local = parameter.detach()
        if cut is not None:
            own = part(local.shape[cut.dim], comm.size, comm.rank)
            local = local.narrow(cut.dim, own.start, len(own)).clone()
        value: Tensor = local
        if self._mesh is not None:
            placement = Shard(cut.dim) if cut is not None else Replicate()
            value = DTensor.from_local(
                local,
                self._mesh,
                [placement],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        elif cut is None:
            return parameter
        return nn.Parameter(value, requires_grad=parameter.requires_grad)

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """For a capture: parameters of full shape that take no memory."""
        if self._cuts is None:
            return contextlib.nullcontext()
        shapes = self._by_tensor(self._shapes)
        return replaced(self._module, lambda p: blank_like(p, shape=shapes.get(id(p))))

    def restore(self) -> None:
        """Makes plain, whole parameters again. Collective over the tensor axis."""
        if self._cuts is None:
            return
        comm = self._context.comm((self._axis,))
        made: dict[int, nn.Parameter] = {}
        by_tensor, shapes = self._by_tensor(self._cuts), self._by_tensor(self._shapes)
        for owner, name, parameter in list(self._places()):
            if id(parameter) not in made:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                cut = by_tensor.get(id(parameter))
                value = local.detach()
                if cut is not None:
                    size = shapes[id(parameter)][cut.dim]
                    rows = comm.all_gather(pad_part(value, cut.dim, size, comm))
                    value = torch.cat(list(rows), cut.dim).narrow(cut.dim, 0, size).clone()
                made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            owner._parameters[name] = made[id(parameter)]
        self._cuts = None

    def _by_tensor(self, named: Mapping[str, Value]) -> dict[int, Value]:
        """The values by the tensors that have these names now."""
        return {id(self._module.get_parameter(name)): value for name, value in named.items()}

    def _places(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        for owner in self._module.modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is not None:
                    yield owner, name, parameter
