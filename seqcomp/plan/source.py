"""Where the parts of a plan were written: plan paths -> line and column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Path = tuple[str | int, ...]
Position = tuple[int, int]
"""Line and column, both counted from 1."""


@dataclass(frozen=True, eq=False)
class PlanSource:
    """Name of the text (a file name) and the positions of its keys and values.

    Any two are equal: plans that say the same are equal wherever they were written.
    """

    name: str = ""
    keys: Mapping[Path, Position] = field(default_factory=dict)
    values: Mapping[Path, Position] = field(default_factory=dict)

    def where(self, path: Sequence[str | int], *, value: bool = False) -> str:
        """``name:line:column path`` of the key (or value), or of the closest one around it."""
        path = tuple(path)
        text = dotted(path)
        for length in range(len(path), -1, -1):
            exact = value and length == len(path)
            first, second = (self.values, self.keys) if exact else (self.keys, self.values)
            position = first.get(path[:length]) or second.get(path[:length])
            if position is not None:
                return f"{self.name}:{position[0]}:{position[1]} {text}".rstrip()
        return f"{self.name} {text}".strip()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanSource)

    def __hash__(self) -> int:
        return 0


NOWHERE = PlanSource()


def dotted(path: Sequence[str | int]) -> str:
    """``overrides[0].ring.transport``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
