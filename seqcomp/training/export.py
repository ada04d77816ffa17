"""A whole model out of its parts: state dicts in one file, and safetensors."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from seqcomp.training.job import Job, second_names
from seqcomp.training.state import CheckpointError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def export_safetensors(
    model: nn.Module, path: str | Path, metadata: dict[str, str] | None = None
) -> list[str]:
    """The whole model as a .safetensors file with the original names; the names it has.

    Collective: parameters are gathered one by one and written by rank 0, which never holds more
    than one. A tied weight is there once, under its first name. Raises CheckpointError on all ranks
    where rank 0 cannot write; what was there before stays.
    """
    path = Path(path)
    names = _names(model)
    state = model.state_dict()
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in names:
        x = state[name]
        start, end = end, end + x.numel() * x.element_size()
        header[name] = {
            "dtype": _DTYPES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = _whole(state, names)

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, x in parts:
                file.write(x.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())

    _written(path, write, parts)
    return names


def save_full(job: Job, path: str | Path, step: int) -> None:
    """Model, optimizer and step in one file of torch.save, as one process would. Collective.

    Raises CheckpointError as `export_safetensors` does.
    """
    path = Path(path)
    state = job.model.state_dict()
    model = {name: x for name, x in _whole(state, list(state)) if _rank() == 0}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    optimizer = get_optimizer_state_dict(job.model, job.optimizer, options=options)
    whole = {"model": model, "optimizer": optimizer, "step": step}

    def write(partial: Path) -> None:
        with partial.open("wb") as file:  # whose errors are those of the system
            torch.save(whole, file)

    _written(path, write)


def load_full(job: Job, path: str | Path) -> int:
    """Fills the job from such a file, which every rank reads; its step. Collective."""
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    job.optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(job.model, state["model"], options=options)
    set_optimizer_state_dict(job.model, job.optimizer, state["optimizer"], options=options)
    return int(state["step"])


def _written(path: Path, write: Callable[[Path], object], gathers: Iterable[Any] = ()) -> None:
    """`write(file)` on rank 0, and the file in the place of `path`; its error on all ranks.

    gathers: what is left of them after `write`, or on other ranks, is made here: no rank stays
    behind in one.
    """
    partial, error = path.with_name(f"{path.name}.partial"), None
    if _rank() == 0:
        try:
            write(partial)
            partial.rename(path)
        except OSError as failure:
            partial.unlink(missing_ok=True)
            error = failure
    for _ in gathers:
        pass
    told = [repr(error) if error else ""]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(told)
    if told[0]:
        raise CheckpointError(f"{path.name} failed: rank 0: {told[0]}") from error


def _names(model: nn.Module) -> list[str]:
    second = second_names(model)
    return [name for name in model.state_dict() if name not in second]


def _whole(state: dict[str, Tensor], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """One tensor after the other, on the CPU; gathered where ranks hold parts of it."""
    for name in names:
        x = state[name].detach()
        yield name, (x.full_tensor() if isinstance(x, DTensor) else x).cpu()


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
