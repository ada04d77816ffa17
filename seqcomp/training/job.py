"""What a training job consists of, as a state dict that any other plan can load.

Keys and full shapes are those of the original module. Parameters are whatever the plan made of
them: DTensors are saved by their parts, of any size, and plain ones once. Tied weights are there
under their first name only. The optimizer's state goes by the names of parameters.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict

from seqcomp.lowering.compiled import compiled_of
from seqcomp.plan.load import dump_plan


class Stateful(Protocol):
    """Samplers, schedulers: small state that JSON can hold, the same on all ranks."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class Job:
    """A model (compiled or not), its optimizer, and what else has state, by name."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    stateful: Mapping[str, Stateful] = field(default_factory=dict)


def collect(job: Job, rank: int) -> dict[str, Any]:
    """The job as torch.distributed.checkpoint takes it; its tensors are the job's own.

    An optimizer that has not stepped yet is given its state, by a step that changes nothing.
    """
    model, optimizer = get_state_dict(job.model, job.optimizer)
    for name in second_names(job.model):
        model.pop(name, None)
    # As one item: a group names all of its parameters, and torch would store every name apart.
    groups = pickle.dumps(optimizer["param_groups"])
    return {
        "model": model,
        "optimizer": {"state": optimizer["state"], "param_groups": groups},
        "rng": {str(rank): pickle.dumps(random_states())},
    }


def restore(job: Job, state: Mapping[str, Any]) -> None:
    """Puts a loaded state back; the tensors of the model have been filled in place."""
    held = state["optimizer"]
    groups = pickle.loads(held["param_groups"])
    set_optimizer_state_dict(
        job.model, job.optimizer, {"state": held["state"], "param_groups": groups}
    )
    (random_state,) = state["rng"].values()
    set_random_states(pickle.loads(random_state))


def tensors_of(state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of a nested state by its dotted key."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found |= tensors_of(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            found[prefix + key] = value
    return found


def second_names(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters -> the first name."""
    first: dict[int, str] = {}
    second = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            second[name] = known
    return second


def plan_of(model: nn.Module) -> str | None:
    """The plan of a compiled module as YAML; None for any other."""
    compiled = compiled_of(model)
    return None if compiled is None else dump_plan(compiled.plan)


def random_states() -> dict[str, Any]:
    """Of torch (CPU and this rank's accelerator), numpy and Python."""
    states = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    device = torch.accelerator.current_accelerator()
    if device is not None and torch.accelerator.is_available():
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Undoes `random_states`. A state of an accelerator is left out where there is none."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    device = torch.accelerator.current_accelerator()
    if "device" in states and device is not None and torch.accelerator.is_available():
        torch.get_device_module(device).set_rng_state(states["device"])
