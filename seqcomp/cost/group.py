"""How collectives of a plan run on a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from seqcomp.cost.collectives import collective_seconds
from seqcomp.cost.timeline import Timeline
from seqcomp.hardware.cluster import Cluster, Span
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.strategies.base import CommStep


@dataclass(frozen=True)
class Group:
    """How collectives of a plan's axes run on a cluster."""

    plan: ResolvedPlan
    cluster: Cluster
    _spans: dict[str, Span] = field(default_factory=dict, compare=False, repr=False)

    def span(self, axis: str) -> Span:
        """Of an axis, or of several joined with "+"."""
        if axis not in self._spans:
            self._spans[axis] = self.cluster.span(self.plan.axes, axis.split("+"))
        return self._spans[axis]

    def seconds(self, step: CommStep) -> float:
        """Of all collectives of a step."""
        span = self.span(step.axis)
        return collective_seconds(self.cluster, span, step.kind, step.bytes_sent, step.count)

    def link(self, axis: str) -> str:
        """Name of the slowest link along an axis."""
        return self.cluster.link_for(self.span(axis)).name

    def send(self, into: Timeline, what: str, steps: list[CommStep]) -> None:
        """One after the other, waited for."""
        for step in steps:
            name = f"{step.kind} of {what}"
            into.exchange(name, step.axis, self.link(step.axis), self.seconds(step))

    def behind(self, into: Timeline, what: str, steps: list[CommStep]) -> None:
        """In the background of all that is in the timeline."""
        for step in steps:
            name = f"{step.kind} of {what}"
            into.behind(name, step.axis, self.link(step.axis), self.seconds(step))
