"""One point of the search space, and the plan that it stands for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.plan.legality import length_factor
from seqcomp.plan.schema import OutputMode, Plan, Transport
from seqcomp.strategies.ring import Layout

Checkpoint = Literal["none", "selective", "block"]
STRATEGY_OF: Mapping[str, str] = MappingProxyType(
    {"data": "data", "ring": "ring", "ulysses": "ulysses", "tensor": "megatron_sp"}
)
"""Axis -> the strategy that owns it; in the order outermost first in which meshes are usual."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many ranks each axis has; 1 where a strategy is not used."""

    data: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1

    def of(self, axis: str) -> int:
        """Size of an axis by name."""
        size: int = getattr(self, axis)
        return size

    @property
    def gpus(self) -> int:
        """Their product."""
        return math.prod(self.of(axis) for axis in STRATEGY_OF)

    @property
    def inner(self) -> int:
        """Ranks among which a ring rank's tokens are cut evenly."""
        return self.ulysses * self.tensor

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of more than one rank, in the usual order."""
        return tuple(axis for axis in STRATEGY_OF if self.of(axis) > 1)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.of(axis)}" for axis in self.axes) or "1 GPU"


@dataclass(frozen=True, slots=True)
class Composition:
    """A composition of strategies: all that the search decides.

    ``order``: the axes of more than one rank, outermost first. ``fsdp``: the axes over which
    parameters are sharded, () for none. ``padded``: the length does not divide and is padded.
    """

    degrees: Degrees
    order: tuple[str, ...]
    layout: Layout = "contiguous"
    transport: Transport = "p2p"
    fsdp: tuple[str, ...] = ()
    reshard: bool = True
    checkpoint: Checkpoint = "none"
    loss_chunks: int = 1
    padded: bool = False

    def __post_init__(self) -> None:
        assert set(self.order) == set(self.degrees.axes)
        assert set(self.fsdp) <= set(self.order) - {"tensor"}

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> size, outermost first; one rank is a data axis of one."""
        return {axis: self.degrees.of(axis) for axis in self.order} or {"data": 1}

    @property
    def factor(self) -> int:
        """Lengths that need no padding are the multiples of this."""
        return length_factor(self.layout, self.degrees.ring, self.degrees.inner)

    def to_plan(self, outputs: Mapping[str, OutputMode] | None = None) -> Plan:
        """The plan, with ``outputs`` as the model needs them."""
        strategies: dict[str, Any] = {STRATEGY_OF[axis]: {} for axis in self.mesh}
        if "ring" in strategies:
            strategies["ring"] = {"layout": self.layout, "transport": self.transport}
        if self.fsdp:
            strategies["fsdp"] = {"axes": list(self.fsdp), "reshard": self.reshard}
        return Plan(
            mesh=FrozenMap(self.mesh),
            strategies=strategies,
            outputs=FrozenMap(outputs or {}),
            padding="pad" if self.padded else "none",
            memory={"checkpoint": self.checkpoint, "loss_chunks": self.loss_chunks},
        )
