"""What `train_text.py` measures: time, memory, bytes sent, gradients."""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import seqcomp
from seqcomp.strategies.base import AttentionShape
from seqcomp.strategies.compose import layer_steps


@dataclass
class Run:
    """One training run as one process saw it."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    compile_s: float = 0.0
    saved_bytes: int = 0
    peak_bytes: int = 0


@contextmanager
def saved_activations(run: Run, model: nn.Module) -> Iterator[None]:
    """Adds up in `run.saved_bytes` what autograd saves inside.

    A storage counts once, however many tensors share it; those of parameters do not count.
    """
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: set[int] = set()

    def save(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in seen | parameters:
            seen.add(storage.data_ptr())
            run.saved_bytes += storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        yield


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on a GPU, or the most of this process in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        line = next(t for t in status.read_text().splitlines() if t.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient, on the CPU."""
    return {name: p.grad.detach().cpu().clone() for name, p in model.named_parameters()}


def gradient_error(model: nn.Module, wanted: dict[str, Tensor]) -> float:
    """Largest max|dg| / max|g| over all parameters and ranks; rank 0 has the gradients `wanted`."""
    worst = 0.0
    for name, parameter in model.named_parameters():
        found = parameter.grad
        want = wanted[name].to(found) if wanted else torch.empty_like(found)
        dist.broadcast(want, src=0)
        worst = max(worst, float((found - want).abs().max() / want.abs().max()))
    result = torch.tensor(worst, device=found.device)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return float(result)


@dataclass(frozen=True)
class Sent:
    """Bytes that this rank sent in one step for one purpose; `formula` where there is one."""

    purpose: str
    how: str
    counted: int
    formula: int | None


def sent_bytes(model: nn.Module, batch: int, length: int) -> list[Sent]:
    """What the counter of this rank holds after one step on [batch, length], by purpose."""
    compiled = seqcomp.of(model)
    attentions = {item.where: item for item in compiled.programs[-1].facts.attentions}

    counted: dict[tuple[str, str], int] = defaultdict(int)
    for row in compiled.context.traffic.rows():
        purpose = row.label
        if row.label in attentions:
            purpose = f"attention, {row.phase}"
        counted[purpose, f"{row.kind} over {row.axis}"] += row.bytes_sent

    formula: dict[tuple[str, str], int] = defaultdict(int)
    for where, item in attentions.items():
        shape = AttentionShape(
            batch, length, item.heads, item.kv_heads, item.head_dim, element_bytes=4
        )
        for step in layer_steps(compiled.resolved, shape, where):
            formula[f"attention, {step.phase}", f"{step.kind} over {step.axis}"] += step.bytes_sent
    world = dist.get_world_size()
    reduced = sum(p.numel() * p.element_size() for p in model.parameters())
    for purpose, how in counted:
        if purpose == "gradients":
            formula[purpose, how] = 2 * (world - 1) * reduced // world
    keys = sorted({*counted, *formula})
    return [Sent(*key, counted[key], formula.get(key)) for key in keys]
