"""The repeated blocks of a model: what sharding, checkpointing and compilation work on."""

from __future__ import annotations

from torch import nn


def blocks_of(module: nn.Module) -> tuple[str, ...]:
    """Paths of the blocks of `module`, in the order of the module tree, none inside another.

    Models of transformers name the classes (``_no_split_modules``) of the entries of their lists.
    In others every entry of the outermost ModuleLists and ModuleDicts is one, and the entries of a
    Sequential that have parts of their own and are of a class that comes again. Modules without
    parameters are none.
    """
    named = {
        name
        for part in module.modules()
        for name in getattr(part, "_no_split_modules", None) or ()
        if isinstance(name, str)
    }
    found: list[str] = []
    _collect(module, "", named, found)
    if not found and named:
        _collect(module, "", set(), found)
    return tuple(found)


def _collect(module: nn.Module, path: str, named: set[str], found: list[str]) -> None:
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if next(child.parameters(), None) is None:
            continue
        listed = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        block = listed and type(child).__name__ in named if named else _is_entry(module, child)
        if block:
            found.append(where)
        else:
            _collect(child, where, named, found)


def _is_entry(container: nn.Module, child: nn.Module) -> bool:
    if isinstance(container, nn.ModuleList | nn.ModuleDict):
        return True
    if not isinstance(container, nn.Sequential) or next(child.children(), None) is None:
        return False
    return sum(type(other) is type(child) for other in container) > 1
