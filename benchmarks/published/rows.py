"""One published measurement, and helpers to predict it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from seqcomp.cost.alone import attention_timeline
from seqcomp.cost.named import load_shape
from seqcomp.cost.run import Mode, Run
from seqcomp.cost.shape import ModelShape
from seqcomp.hardware.cluster import Cluster
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import ResolvedPlan, resolve

Predict = Callable[[Cluster], float]


@dataclass(frozen=True)
class Row:
    """``published`` in ``unit``; ``predict`` gives the same of a cluster."""

    source: str
    name: str
    published: float
    unit: str
    predict: Predict = field(compare=False)

    def error(self, cluster: Cluster) -> float:
        """Predicted over published, less one."""
        return self.predict(cluster) / self.published - 1


def typical(errors: Iterable[float]) -> float:
    """Median of the absolute errors."""
    return statistics.median(map(abs, errors))


def plan_of(mesh: Mapping[str, int], **more: Any) -> ResolvedPlan:
    """A legal plan with a strategy for every axis; ``more``: settings of the plan and its ring."""
    settings = {axis: dict(more.pop(axis, {})) for axis in mesh}
    names = {"tensor": "megatron_sp"}
    strategies = {names.get(axis, axis): own for axis, own in settings.items()}
    if "fsdp" in more:
        strategies["fsdp"] = more.pop("fsdp")
    return resolve(load_plan({"mesh": dict(mesh), "strategies": strategies, **more}))


def attention_seconds(
    cluster: Cluster,
    model: ModelShape,
    length: int,
    mode: Mode,
    *,
    ulysses: int = 1,
    ring: int = 1,
    layout: str = "zigzag",
    dtype: str = "bf16",
) -> float:
    """One layer's attention over a mesh of ring x ulysses."""
    plan = plan_of({"ring": ring, "ulysses": ulysses}, ring={"layout": layout})
    return attention_timeline(plan, model, cluster, Run(length, dtype=dtype, mode=mode)).now


LLAMA_8B = load_shape("llama3-8b")
