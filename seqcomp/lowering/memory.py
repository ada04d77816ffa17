"""What a plan's `memory` section does to a program: which calls of modules run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from seqcomp.capture.blocks import blocks_of
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.lowering import ops
from seqcomp.lowering.fsdp_units import owner
from seqcomp.lowering.scopes import Call
from seqcomp.plan.schema import Memory
from seqcomp.runtime.recompute import Checkpoint

# Exchanges that save nothing, with results no larger than a rank's share: see runtime/recompute.py.
KEPT = (ops.AllToAll, ops.ReduceScatter, ops.AllReduce)


@dataclass(frozen=True)
class Rerun:
    """A call that runs again in backward: how, and the nodes of the flat graph that are in it."""

    path: str
    how: Checkpoint
    nodes: tuple[Node, ...]


def checkpoints(
    module: torch.nn.Module, calls: Sequence[Call], memory: Memory, *, grad: bool
) -> tuple[dict[tuple[str, str], Rerun], list[Diagnostic]]:
    """How the calls of the module's blocks run, by path and token, and what to say about it.

    Raises PlanError SC116 where the module has no blocks that can run again.
    """
    if memory.checkpoint == "none" or not grad:
        return {}, []
    blocks = blocks_of(module)
    if not blocks:
        raise PlanError([_no_blocks(module)])
    found = {
        (call.path, call.token): Rerun(call.path, _how(call.nodes, memory), call.nodes)
        for call in calls
        if call.path in blocks
    }
    again = {rerun.path for rerun in found.values()}
    notes = [
        _not_again(path)
        for path in blocks
        if path not in again and any(owner(call.path, (path,)) for call in calls)
    ]
    if memory.offload == "cpu" and all(p.device.type == "cpu" for p in module.parameters()):
        notes.append(_on_host(module))
    return found, notes


def _how(nodes: Sequence[Node], memory: Memory) -> Checkpoint:
    targets = [node.target for node in nodes]
    return Checkpoint(
        keeps=memory.checkpoint == "selective",
        kernels=any(
            "attention" in node.meta and not isinstance(node.target, ops.Attention)
            for node in nodes
        ),
        calls=any(isinstance(target, ops.Op) for target in targets),
        # What a unit saves depends on the tokens that this rank has.
        early_stop=not any(isinstance(target, ops.TokenLocal) for target in targets),
        offload=memory.offload == "cpu",
    )


def _no_blocks(module: torch.nn.Module) -> Diagnostic:
    return diagnostic(
        "SC116",
        where=type(module).__name__,
        found="no blocks",
        legal="layers in an nn.ModuleList or nn.ModuleDict, or of one class in an nn.Sequential",
        help="remove memory.checkpoint from the plan, or put the repeated layers into an "
        "nn.ModuleList; torch.utils.checkpoint around modules of your choice works too",
    )


def _not_again(path: str) -> Diagnostic:
    return diagnostic(
        "SC415",
        where=path,
        found="values that go in and out of the block while it runs",
        legal="blocks that are called once with all their inputs",
        help="nothing to do: the values of this block are saved; call its parts inside its forward "
        "to have it run again",
    )


def _on_host(module: torch.nn.Module) -> Diagnostic:
    return diagnostic(
        "SC416",
        where=type(module).__name__,
        found="a model on the CPU",
        legal="models on an accelerator",
        help="nothing to do: the inputs of blocks stay where they are",
    )
