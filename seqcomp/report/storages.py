"""Storages of tensors with their sizes, and the rows of what an option keeps of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

Values = Mapping[Node, Any]
Bytes = dict[Any, int]
"""Sizes of storages, by what tells them apart."""


@dataclass(frozen=True)
class MemoryRow:
    """One option: the bytes that one rank saves for the backward with it and without it.

    `what` is the option as the plan has it, `where` what it acts on, `count` in how many calls.
    `at_least`: a unit that runs untraced saves more than is known. `on_host`: what learns of
    the kept values waits in host memory.
    """

    what: str
    where: str
    count: int
    bytes_kept: int
    bytes_without: int
    at_least: bool = False
    on_host: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Storage:
    """A storage as a key. It holds it: an address that is free is used again."""

    def __init__(self, x: Tensor) -> None:
        self._held = x.untyped_storage()
        self._place: int = self._held._cdata

    def __hash__(self) -> int:
        return self._place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Storage) and self._place == other._place


def key_of(x: Tensor) -> Any:
    """What tells the storage of x from others."""
    return _Storage(x)


def storages(tensors: Iterable[Any]) -> Bytes:
    """Those of the tensors among these values, each once."""
    return {key_of(x): x.untyped_storage().nbytes() for x in tensors if isinstance(x, Tensor)}


def operands(node: Node, values: Values) -> list[Any]:
    """The arguments of a node, values for nodes."""
    return [values[item] if isinstance(item, Node) else item for item in node.args]


def pattern(paths: Iterable[str]) -> str:
    """Paths with * for numbers, each once."""
    patterns = {".".join("*" if p.isdigit() else p for p in path.split(".")) for path in paths}
    return ", ".join(sorted(patterns))
