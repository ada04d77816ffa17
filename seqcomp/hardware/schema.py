"""The files of machines: units in the names of keys, every number with its source."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from seqcomp.hardware.cluster import Cluster, Curve, Device, Kernels, Link, Rate
from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.strategies.base import Kind

Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
Source = Annotated[str, Field(min_length=1)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Number(_Model):
    """A number and where it is from."""

    value: Finite
    source: Source


class Rated(Number):
    """A size or a rate: something is divided by it."""

    value: Positive


class Points(_Model):
    """A measured curve: [x, y] with x ascending."""

    points: Annotated[list[tuple[Positive, Share]], Field(min_length=1)]
    source: Source

    def curve(self) -> Curve:
        return Curve(tuple(sorted(self.points)))


class KernelsFile(_Model):
    """See `Kernels`."""

    dense: Points
    attention_forward: Points
    attention_backward: Points
    streaming: Rated
    launch_us: Number
    ring_round_us: Number | None = None
    contention: Number | None = None


class DeviceFile(_Model):
    """See `Device`."""

    name: str
    memory_gib: Rated
    memory_gb_s: Rated
    peak_tflops: Annotated[dict[str, Rated], Field(min_length=1)]
    kernels: KernelsFile

    def build(self) -> Device:
        kernels = self.kernels
        return Device(
            name=self.name,
            memory=int(self.memory_gib.value * 2**30),
            bandwidth=self.memory_gb_s.value * 1e9,
            peak=FrozenMap({key: item.value * 1e12 for key, item in self.peak_tflops.items()}),
            kernels=Kernels(
                dense=kernels.dense.curve(),
                attention_forward=kernels.attention_forward.curve(),
                attention_backward=kernels.attention_backward.curve(),
                streaming=kernels.streaming.value,
                launch=kernels.launch_us.value * 1e-6,
                ring_round=kernels.ring_round_us.value * 1e-6 if kernels.ring_round_us else 0.0,
                contention=kernels.contention.value if kernels.contention else 0.0,
            ),
        )


class RateFile(_Model):
    """See `Rate`; ``gb_s`` are bytes that one rank sends over the time without the latency."""

    ranks: Count
    latency_us: Finite
    gb_s: Positive


class RatesFile(_Model):
    """Measured rates of one kind of collective."""

    points: Annotated[list[RateFile], Field(min_length=1)]
    source: Source


class LinkFile(_Model):
    """See `Link`."""

    name: str
    latency_us: Number
    gb_s: Rated
    rates: dict[Kind, RatesFile] = {}

    def build(self) -> Link:
        rates: dict[str, tuple[Rate, ...]] = {
            kind: tuple(
                Rate(p.ranks, p.latency_us * 1e-6, p.gb_s * 1e9)
                for p in sorted(item.points, key=lambda p: p.ranks)
            )
            for kind, item in self.rates.items()
        }
        return Link(
            self.name, self.latency_us.value * 1e-6, self.gb_s.value * 1e9, FrozenMap(rates)
        )


class ClusterFile(_Model):
    """See `Cluster`; device and links are written out, or named: files of their folders."""

    name: str
    device: DeviceFile
    gpus_per_node: Count
    max_nodes: Count
    intra: LinkFile
    inter: LinkFile
    notes: list[str] = []

    def build(self) -> Cluster:
        return Cluster(
            name=self.name,
            device=self.device.build(),
            gpus_per_node=self.gpus_per_node,
            max_nodes=self.max_nodes,
            intra=self.intra.build(),
            inter=self.inter.build(),
            notes=tuple(self.notes),
        )


Document = dict[str, Any]
