"""Other tensors in the place of a module's own, for the time of a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def blank_like(
    parameter: nn.Parameter,
    *,
    shape: torch.Size | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> nn.Parameter:
    """A parameter of full shape that takes no memory; dtype: where it is a floating one."""
    kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    blank = torch.empty((), dtype=kind, device=device or parameter.device)
    whole = blank.expand(parameter.shape if shape is None else shape)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


@contextlib.contextmanager
def replaced(
    module: nn.Module,
    parameter: Callable[[nn.Parameter], nn.Parameter],
    buffer: Callable[[Tensor], Tensor] = lambda old: old,
) -> Iterator[None]:
    """What the functions give in the place of each tensor, once for those that are tied."""
    made: dict[int, Any] = {}
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for part in module.modules():
        tables: tuple[tuple[dict[str, Any], Callable[[Any], Any]], ...] = (
            (part._parameters, parameter),
            (part._buffers, buffer),
        )
        for own, change in tables:
            held.append((own, dict(own)))
            for name, old in own.items():
                if old is not None:
                    if id(old) not in made:
                        made[id(old)] = change(old)
                    own[name] = made[id(old)]
    try:
        yield
    finally:
        for own, before in held:
            own.update(before)
