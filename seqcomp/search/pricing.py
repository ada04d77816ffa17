"""Compositions priced by the cost model, and the bounds that spare most of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from seqcomp.cost.estimate import Estimate, estimate
from seqcomp.cost.memory import memory_rows, peak_bytes
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.cost.workload import workload_of
from seqcomp.hardware.cluster import Cluster
from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.plan.resolve import ResolvedPlan, resolve
from seqcomp.plan.schema import OutputMode
from seqcomp.search.bounds import ideal, without_parameters
from seqcomp.search.composition import Checkpoint, Composition, Degrees
from seqcomp.search.diff import bytes_by_axis
from seqcomp.search.space import Limits, Space, arrangements_of, thriftiest_of


@dataclass(frozen=True, slots=True)
class Pricer:
    """``run.batch`` are the sequences of all GPUs together: what is compared does the same work."""

    model: ModelShape
    cluster: Cluster
    run: Run
    outputs: FrozenMap[OutputMode]

    def limits(self, *, padding: bool) -> Limits:
        """What the model and the run allow."""
        facts = self.model.facts
        heads = {(item.heads, item.kv_heads) for item in facts.attentions}
        return Limits(
            heads=tuple(sorted(heads)),
            widths=() if facts.mlp_width is None else (facts.mlp_width,),
            batch=self.run.batch,
            length=self.run.seq_len,
            causal=facts.all_causal,
            padding=padding,
        )

    def resolved(self, composition: Composition) -> ResolvedPlan:
        """The plan, checked by every rule that can be asked without a module."""
        return resolve(
            composition.to_plan(self.outputs),
            self.model.facts,
            world_size=composition.degrees.gpus,
            seq_len=self.run.seq_len,
        )

    def run_of(self, composition: Composition) -> Run:
        """What one data rank runs: its share of the batch."""
        return replace(self.run, batch=self.run.batch // composition.degrees.data)

    def price(self, composition: Composition) -> Estimate:
        """What the cost model says of it."""
        plan = self.resolved(composition)
        run = self.run_of(composition)
        return estimate(plan, self.model, self.cluster, run, advise=False)

    def held(self, composition: Composition) -> int:
        """Bytes on the fullest GPU, without the rest of the estimate."""
        plan = self.resolved(composition)
        return peak_bytes(memory_rows(plan, self.model, self.run_of(composition)))

    def fits(self, composition: Composition) -> bool:
        """Whether that is within the memory of a GPU."""
        return self.held(composition) <= self.cluster.device.memory

    def bytes_by_axis(self, composition: Composition) -> dict[str, int]:
        """What one rank sends in one step."""
        return bytes_by_axis(self.resolved(composition), self.model, self.run_of(composition))

    def within(self, limits: Limits, space: Space) -> Bounded:
        """The same with bounds on what can be chosen."""
        return Bounded(self, limits, space)


@dataclass(frozen=True, slots=True)
class Bounded:
    """A pricer and its bounds (see `bounds`), as `rank` asks for them.

    ``levels``: of each set of degrees, the first kind of checkpoint with which anything fits.
    """

    pricer: Pricer
    limits: Limits
    space: Space
    levels: dict[Degrees, Checkpoint | None] = field(default_factory=dict)

    def price(self, composition: Composition) -> Estimate:
        """What the cost model says of it."""
        return self.pricer.price(composition)

    def fits(self, composition: Composition) -> bool:
        """Whether it is within the memory of a GPU."""
        return self.pricer.fits(composition)

    def floor(self, composition: Composition) -> float:
        """The time of an arrangement if parameters were not sent; infinite: nothing fits."""
        return self._floor(composition, self.pricer.cluster)

    def floor_of_degrees(self, degrees: Degrees) -> float:
        """The same on ideal links, of the fastest layout and transport."""
        machine = ideal(self.pricer.cluster, degrees.gpus)
        arranged = arrangements_of(degrees, degrees.axes, self.limits, self.space)
        return min(self._floor(composition, machine) for composition in arranged)

    def _floor(self, composition: Composition, cluster: Cluster) -> float:
        level = self._level(composition.degrees)
        if level is None:
            return math.inf
        free = tuple(axis for axis in composition.order if axis != "tensor")
        pricer, light = self.pricer, replace(composition, fsdp=free, checkpoint=level)
        plan, run = pricer.resolved(light), pricer.run_of(light)
        work = without_parameters(workload_of(plan, pricer.model, run))
        found = estimate(plan, pricer.model, cluster, run, advise=False, work=work)
        return found.step_seconds

    def _level(self, degrees: Degrees) -> Checkpoint | None:
        if degrees not in self.levels:
            one = replace(self.space, checkpoint=self.space.checkpoint[-1:])
            thrifty = list(thriftiest_of(degrees, self.limits, one))
            self.levels[degrees] = next(
                (
                    level
                    for level in self.space.checkpoint
                    if any(self.fits(replace(one, checkpoint=level)) for one in thrifty)
                ),
                None,
            )
        return self.levels[degrees]
