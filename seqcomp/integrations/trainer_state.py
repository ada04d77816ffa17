"""Whole states of models and optimizers whose parameters are divided, as files of one process.

What is written is what ``transformers.Trainer`` writes alone, so that a training goes on under
another plan, or without one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Whole tensors by name on rank 0, nothing elsewhere. Collective."""
    return get_model_state_dict(model, options=_WHOLE)


@contextlib.contextmanager
def loading_whole_weights(model: nn.Module) -> Iterator[None]:
    """In this context `model.load_state_dict` takes whole tensors, on every rank."""

    def load(state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        del assign  # parameters stay the objects that the optimizer has
        options = StateDictOptions(full_state_dict=True, strict=strict)
        del vars(model)["load_state_dict"]  # it is called with this rank's parts
        try:
            return set_model_state_dict(model, dict(state), options=options)
        finally:
            vars(model)["load_state_dict"] = load

    vars(model)["load_state_dict"] = load
    try:
        yield
    finally:
        del vars(model)["load_state_dict"]


def save_whole_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, *, writes: bool
) -> None:
    """``optimizer.state_dict()`` as it would be of whole parameters. Collective; one writes."""
    found: Any = get_optimizer_state_dict(model, optimizer, options=_WHOLE)
    if not writes:
        return
    names = _names(model, optimizer)
    number = {name: index for index, name in enumerate(names)}
    groups = [
        {**group, "params": [number[name] for name in group["params"]]}
        for group in found["param_groups"]
    ]
    state = {number[name]: own for name, own in found["state"].items()}
    torch.save({"state": state, "param_groups": groups}, path)


def load_whole_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Takes its part of what `save_whole_optimizer`, or an optimizer of one process, wrote."""
    given = torch.load(path, map_location="cpu", weights_only=True)
    if not given["state"]:  # torch asks such states for their device
        optimizer.load_state_dict(given)
        return
    names = _names(model, optimizer)
    whole: Any = {
        "state": {names[number]: own for number, own in given["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in given["param_groups"]
        ],
    }
    set_optimizer_state_dict(
        model, optimizer, whole, options=StateDictOptions(full_state_dict=True)
    )


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the optimizer's parameters, in the order in which it numbers them."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [known[id(p)] for group in optimizer.param_groups for p in group["params"]]
