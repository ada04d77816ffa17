"""What FSDP2 sends for one call: parameters gathered, gradients scattered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from seqcomp.capture.edit import scope_of
from seqcomp.layout.parts import part_size
from seqcomp.lowering.fsdp_units import owner
from seqcomp.lowering.program import Program
from seqcomp.lowering.sharded import PRECISIONS, shard_dim, sharding_axes
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.runtime.comm import mesh_dim
from seqcomp.strategies.base import CommStep
from seqcomp.strategies.data import Fsdp


def fsdp_steps(
    program: Program, values: Mapping[Node, Any], resolved: ResolvedPlan
) -> Iterator[tuple[str, CommStep]]:
    """The steps of every unit in one call and its backward, by label, the root first.

    Shards are padded to equal sizes, and count as they travel.
    """
    if program.fsdp_units is None:
        return
    strategy = resolved.plan.strategies.fsdp
    assert strategy is not None
    shards, replicas = sharding_axes(resolved)
    ways, copies = (math.prod(resolved.axes[a] for a in axes) for axes in (shards, replicas))
    low = PRECISIONS.get(strategy.mixed_precision)
    calls = {"": 1, **_calls(program)}
    parameters = parameters_of(program)
    for unit in ("", *program.fsdp_units):
        if unit not in calls:
            continue
        members = [n for n in parameters if owner(name_of(program, n), program.fsdp_units) == unit]
        sizes = {n: shard_size(program, n, values[n], ways) for n in members}
        given = sum(
            size * (low if low and values[n].is_floating_point() else values[n].dtype).itemsize
            for n, size in sizes.items()
        )
        learnt = sum(
            size * max(values[n].element_size(), 4)
            for n, size in sizes.items()
            if values[n].requires_grad and parameters[n] and program.grad
        )
        # Torch keeps the root's parameters from forward to backward.
        fsdp = Fsdp(
            ways,
            mesh_dim(shards),
            reshard=strategy.reshard and bool(unit) and program.grad,
            replicas=copies,
            replica_axis=mesh_dim(replicas),
        )
        for step in fsdp.gradient_steps(ways * given, ways * learnt):
            again = calls[unit] if step.kind == "all_gather" else 1
            total = again * step.bytes_sent
            yield (
                f"fsdp {unit}".rstrip(),
                replace(step, count=again, bytes_sent=total),
            )


def parameters_of(program: Program) -> dict[Node, bool]:
    """Every parameter once, whatever the number of its names, and whether anything uses it."""
    found: dict[Node, bool] = {}
    first: dict[str, Node] = {}
    for node in program.flat.nodes:
        if node.name in program.capture.parameters:
            name = name_of(program, node)
            one = first.setdefault(program.aliases.get(name, (name,))[0], node)
            found[one] = found.get(one, False) or bool(node.users)
    return found


def name_of(program: Program, node: Node) -> str:
    return program.capture.state[node.name]


def _calls(program: Program) -> dict[str, int]:
    """How often each unit is called."""
    found: dict[str, set[str]] = {}
    for node in program.flat.nodes:
        for key, path in scope_of(node.meta.get("nn_module_stack") or {}):
            found.setdefault(path, set()).add(key)
    return {path: len(keys) for path, keys in found.items()}


def shard_size(program: Program, node: Node, local: Tensor, ways: int) -> int:
    """Elements of one rank's part, of the largest size."""
    cut = program.cuts.get(name_of(program, node))
    dim = shard_dim(local.shape, ways, cut.dim if cut else None)
    shape = torch.Size(local.shape)
    return part_size(shape[dim], ways) * (shape.numel() // max(shape[dim], 1)) if shape else 1
