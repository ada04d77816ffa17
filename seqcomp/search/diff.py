"""What one plan changes against another: in its text, in time, in bytes sent, in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from seqcomp.cost.estimate import Estimate, estimate
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.cost.workload import workload_of
from seqcomp.hardware.cluster import Cluster
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.plan.schema import Plan

Unit = Literal["s", "B"]


@dataclass(frozen=True, slots=True)
class Term:
    """One quantity under both plans, in seconds or bytes."""

    what: str
    unit: Unit
    before: float
    after: float

    @property
    def change(self) -> float:
        """After less before."""
        return self.after - self.before

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values with exactly the fields of this class."""
        return {"what": self.what, "unit": self.unit, "before": self.before, "after": self.after}


@dataclass(frozen=True, slots=True)
class Difference:
    """``settings``: places in the plan and what stands there before and after (None: nothing).

    ``terms``: time, bytes sent by one rank in one step, memory of the fullest rank; each sum before
    its parts.
    """

    settings: tuple[tuple[str, Any, Any], ...]
    terms: tuple[Term, ...]

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values."""
        return {
            "settings": [
                {"where": where, "before": before, "after": after}
                for where, before, after in self.settings
            ],
            "terms": [term.to_json() for term in self.terms],
        }


def diff(
    before: ResolvedPlan, after: ResolvedPlan, model: ModelShape, cluster: Cluster, run: Run
) -> Difference:
    """The difference of two plans that run the same on each data rank."""
    return difference(
        (before.plan, after.plan),
        (estimate(before, model, cluster, run), estimate(after, model, cluster, run)),
        (bytes_by_axis(before, model, run), bytes_by_axis(after, model, run)),
    )


def difference(
    plans: tuple[Plan, Plan],
    priced: tuple[Estimate, Estimate],
    sent: tuple[Mapping[str, int], Mapping[str, int]],
) -> Difference:
    """From estimates and bytes that are there already; of each pair, the first is before."""
    return Difference(tuple(_settings(*plans)), tuple(_terms(priced, sent)))


def _terms(
    priced: tuple[Estimate, Estimate], sent: tuple[Mapping[str, int], Mapping[str, int]]
) -> Iterator[Term]:
    first, second = priced
    yield Term("step", "s", first.step_seconds, second.step_seconds)
    yield Term("compute", "s", first.compute_seconds, second.compute_seconds)
    yield Term("exposed", "s", first.exposed_seconds, second.exposed_seconds)
    yield from _each("waiting for", "s", first.exposed, second.exposed)
    yield Term("sent", "B", sum(sent[0].values()), sum(sent[1].values()))
    yield from _each("sent over", "B", *sent)
    yield Term("peak", "B", first.peak_bytes, second.peak_bytes)
    held = ({row.what: row.bytes for row in one.memory} for one in priced)
    yield from _each("held:", "B", *held)


def _each(
    prefix: str, unit: Unit, first: Mapping[str, float], second: Mapping[str, float]
) -> Iterator[Term]:
    for name in dict.fromkeys((*first, *second)):
        yield Term(f"{prefix} {name}", unit, first.get(name, 0), second.get(name, 0))


def bytes_by_axis(plan: ResolvedPlan, model: ModelShape, run: Run) -> dict[str, int]:
    """Bytes that one rank sends in one step, by axis (several joined by +)."""
    work = workload_of(plan, model, run)
    found: dict[str, int] = {}
    steps = [
        (block.count, step)
        for block, own in zip(model.blocks, work.blocks, strict=True)
        for step in own.all
    ]
    for count, step in [*steps, *((1, step) for _, step in work.ends)]:
        found[step.axis] = found.get(step.axis, 0) + count * step.bytes_sent
    return found


def _settings(before: Plan, after: Plan) -> Iterator[tuple[str, Any, Any]]:
    first, second = _flat(before.to_dict()), _flat(after.to_dict())
    for where in dict.fromkeys((*first, *second)):
        if first.get(where) != second.get(where):
            yield where, first.get(where), second.get(where)
    if before.mesh != after.mesh and dict(before.mesh) == dict(after.mesh):
        yield "mesh", list(before.mesh), list(after.mesh)


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted paths; an empty one stands for itself."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        where = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{where}.")
        else:
            found[where] = value
    return found
