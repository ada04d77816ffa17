"""Values for a model that was built on meta, module by module, whole on no rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Init = Callable[[nn.Module], object]


def materialise(
    model: nn.Module,
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
    init: Init | None = None,
) -> None:
    """Gives every parameter and buffer memory on `device` and its initial value.

    Under every plan the values are those that one process draws with the same seed: each module is
    initialised with whole parameters, of which a rank keeps its part, so that no more than the
    largest module is whole at any time. Ties stay. The global random state is left as it was.

    init: sets the parameters and buffers that a module holds itself, without those of its
    children; by default ``_init_weights`` of models of transformers, else ``reset_parameters``.

    Raises RuntimeError that names the tensors which nothing has set: buffers that a constructor
    computes are the usual ones.
    """
    ties = _places(model)
    model.to_empty(device=device)
    for places in ties:  # torch makes a new parameter for each
        first, name = places[0]
        for owner, other in places[1:]:
            owner._parameters[other] = first._parameters[name]
    for tensor in (*model.parameters(), *model.buffers()):
        _mark(tensor)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        _initialise(model, init or _reset, fixed=init is not None)
    unset = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if _is_marked(tensor)
    ]
    if unset:
        raise RuntimeError(
            f"nothing sets {', '.join(unset[:8])}{' ...' if len(unset) > 8 else ''}: pass "
            "materialise(..., init=...), which sets what a module holds itself"
        )


def _initialise(module: nn.Module, init: Init, *, fixed: bool) -> None:
    """Children first, as torch's ``apply`` does."""
    own = getattr(module, "_init_weights", None)
    if not fixed and own is not None and hasattr(module, "config"):
        init = own
    for child in module.children():
        _initialise(child, init, fixed=fixed)
    parts: dict[str, Any] = {
        name: parameter
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    }
    blanks = {
        name: nn.Parameter(
            _marked(torch.empty(part.shape, dtype=part.dtype, device=part._local_tensor.device)),
            requires_grad=False,
        )
        for name, part in parts.items()
    }
    module._parameters.update(blanks)
    try:
        init(module)
        for name, part in parts.items():
            if not _is_marked(blanks[name]):
                part._local_tensor.copy_(_part(blanks[name], part))
    finally:
        module._parameters.update(parts)


def _places(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where each tied parameter is held."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((owner, name))
    return [places for places in found.values() if len(places) > 1]


def _part(whole: Tensor, like: DTensor) -> Tensor:
    """What this rank holds of `whole`; the innermost axis divides first, as Megatron-SP does."""
    mesh, coordinate = like.device_mesh, like.device_mesh.get_coordinate()
    assert coordinate is not None
    for index in reversed(range(mesh.ndim)):
        placement: Any = like.placements[index]
        if isinstance(placement, Shard | _StridedShard):
            pieces = whole.chunk(mesh.size(index), placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = pieces[coordinate[index]] if coordinate[index] < len(pieces) else empty
    return whole


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()


def _mark(tensor: Tensor) -> None:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.data
    _marked(local)


def _marked(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_marked(tensor: Tensor) -> bool:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if local.is_floating_point() or local.is_complex():
        return bool(local.isnan().any())
    least = 0 if local.dtype == torch.bool else torch.iinfo(local.dtype).min
    return local.dtype != torch.bool and bool((local == least).any())
