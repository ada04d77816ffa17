"""What FSDP2 sends for one call: parameters gathered, gradients scattered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from seqcomp.capture.edit import scope_of
from seqcomp.layout.parts import part_size
from seqcomp.lowering.program import Program
from seqcomp.lowering.sharded import PRECISIONS, shard_dim, sharding_axes
from seqcomp.lowering.units import owner
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.runtime.comm import mesh_dim
from seqcomp.strategies.base import Kind, Phase

Row = tuple[str, Kind, str, int, Phase]
"""Label, kind, axes, bytes, phase of one collective that computation can hide."""


def fsdp_rows(
    program: Program, values: Mapping[Node, Any], resolved: ResolvedPlan
) -> Iterator[Row]:
    """The collectives of every unit in one call and its backward, in the order of the forward.

    Shards are padded to equal sizes, and count as they travel. Source: PyTorch FSDP, Zhao et al.,
    2023: all-gather before use, again in backward where freed, reduce-scatter of gradients;
    hybrid sharding sums the shards over the ranks that replicate them.
    """
    if program.units is None:
        return
    strategy = resolved.plan.strategies.fsdp
    assert strategy is not None
    shards, replicas = sharding_axes(resolved)
    ways, copies = (math.prod(resolved.axes[a] for a in axes) for axes in (shards, replicas))
    low = PRECISIONS.get(strategy.mixed_precision)
    calls = _calls(program)
    parameters = parameters_of(program)
    for unit in ("", *program.units):
        if unit and unit not in calls:
            continue
        members = [n for n in parameters if owner(name_of(program, n), program.units) == unit]
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
        label, times = (f"fsdp {unit}", calls[unit]) if unit else ("fsdp", 1)
        axis = mesh_dim(shards)
        if ways > 1 and given:
            for _ in range(times):
                yield label, "all_gather", axis, (ways - 1) * given, "forward"
                if strategy.reshard and unit and program.grad:
                    yield label, "all_gather", axis, (ways - 1) * given, "backward"
        if ways > 1 and learnt:
            yield label, "reduce_scatter", axis, (ways - 1) * learnt, "backward"
        if copies > 1 and learnt:
            sent = 2 * (copies - 1) * learnt // copies
            yield label, "all_reduce", mesh_dim(replicas), sent, "backward"


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
