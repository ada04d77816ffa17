"""Which modules FSDP gathers and frees as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from seqcomp.capture.blocks import blocks_of
from seqcomp.capture.edit import scope_of
from seqcomp.lowering.context import Graph, LoweringContext

LARGE = 2**20
"""Elements from which an embedding or a head outside of the blocks is gathered by itself."""


def candidates(module: nn.Module, large: int = LARGE) -> tuple[str, ...]:
    """Paths of the repeated blocks and of large embeddings and linears outside of them.

    None holds a parameter that another module shares: the root gathers those.
    """
    blocks = blocks_of(module)
    single = [
        path
        for path, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.Linear)
        and part.weight.numel() >= large
        and not owner(path, blocks)
        and path
    ]
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = (*blocks, *single)
    shared = {
        path
        for group in names.values()
        for path in {owner(name, found) for name in group}
        if len({owner(name, found) for name in group}) > 1
    }
    return tuple(path for path in found if path not in shared)


def owner(name: str, units: Iterable[str]) -> str:
    """The unit that holds the parameter or module of this name; "" where only the root does."""
    return next((path for path in units if f"{name}.".startswith(f"{path}.")), "")


def fsdp_units_pass(graph: Graph, context: LoweringContext) -> Graph:
    """Drops the units of which a parameter is used outside of the unit's own calls."""
    if context.fsdp_units is None:
        return graph
    for node in graph.nodes:
        if node.op != "placeholder" or node.name not in context.capture.parameters:
            continue
        unit = owner(context.capture.state[node.name], context.fsdp_units)
        if not unit:
            continue
        if not all(
            any(path == unit for _, path in scope_of(user.meta.get("nn_module_stack") or {}))
            for user in node.users
            if user.op != "output"
        ):
            context.fsdp_units = tuple(path for path in context.fsdp_units if path != unit)
    return graph


def read_inside(
    reads: Mapping[str, Iterable[frozenset[str]]], units: Iterable[str]
) -> tuple[str, ...]:
    """The units of which every parameter is read below a call of the unit.

    reads: by parameter, for each piece of code that names it, the modules being called there.
    """
    units = tuple(units)
    outside = {
        owner(name, units)
        for name, places in reads.items()
        if not all(owner(name, units) in ("", *place) for place in places)
    }
    return tuple(path for path in units if path not in outside)
