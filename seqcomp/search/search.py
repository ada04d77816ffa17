"""``search``: the fastest plan for a model, a cluster and a run, with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from seqcomp.cost.estimate import Estimate
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.diagnostics import Diagnostic
from seqcomp.hardware.cluster import Cluster
from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.plan.schema import OutputMode, Plan
from seqcomp.search.diff import Difference, difference
from seqcomp.search.notes import notes_of
from seqcomp.search.nothing import nothing_fits, too_few_gpus
from seqcomp.search.pricing import Pricer
from seqcomp.search.rank import Counts, Ranked, rank
from seqcomp.search.reasons import Reason, reasons_for
from seqcomp.search.space import Space, size_of


@dataclass(frozen=True)
class Found:
    """The ranking: ``ranked[0]`` is the best, each of the others the best of its degrees.

    ``reasons``: what the best decided and what else there was. ``runner_up``: what the second would
    change. ``space``: compositions that the search chose from. ``notes``: what is not in the times.
    """

    pricer: Pricer
    gpus: int
    ranked: tuple[Ranked[Estimate], ...]
    reasons: tuple[Reason, ...]
    runner_up: Difference | None
    counts: Counts
    space: int
    notes: tuple[Diagnostic, ...]

    @property
    def best(self) -> Ranked[Estimate]:
        """The fastest."""
        return self.ranked[0]

    @property
    def plan(self) -> Plan:
        """The plan of the best."""
        return self.best.composition.to_plan(self.pricer.outputs)

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values: the plans with their estimates, the best first."""
        run = self.pricer.run
        return {
            "model": self.pricer.model.name,
            "cluster": self.pricer.cluster.name,
            "gpus": self.gpus,
            "seq_len": run.seq_len,
            "batch": run.batch,
            "dtype": run.dtype,
            "mode": run.mode,
            "documents": None if run.packed is None else str(run.packed),
            "plan": self.plan.to_dict(),
            "ranked": [
                {
                    "plan": item.composition.to_plan(self.pricer.outputs).to_dict(),
                    "estimate": {**item.price.to_json(), "timeline": []},
                }
                for item in self.ranked
            ],
            "reasons": [reason.to_json() for reason in self.reasons],
            "runner_up": None if self.runner_up is None else self.runner_up.to_json(),
            "space": self.space,
            "degrees": self.counts.degrees,
            "degrees_too_large": self.counts.unfit,
            "estimated": self.counts.priced,
            "notes": [note.to_json() for note in self.notes],
        }


def search(
    model: ModelShape,
    cluster: Cluster,
    run: Run,
    *,
    gpus: int | None = None,
    outputs: Mapping[str, OutputMode] | None = None,
    space: Space | None = None,
    keep: int = 5,
) -> Found:
    """The plan of the shortest step of all that are legal and fit in memory.

    Args:
        model: shapes of its layers.
        cluster: whose GPUs, links and efficiencies are assumed.
        run: what one step is; ``batch`` counts the sequences of all GPUs together, so that every
            plan does the same work.
        gpus: how many are used, all of them; those of the whole cluster otherwise.
        outputs: what the plan says of the model's outputs.
        space: what may be chosen; for prefill nothing is checkpointed and there is no loss.
        keep: how many sets of degrees are ranked.

    A length that no composition divides is padded, where none fits without.

    Raises:
        PlanError: SC122 where nothing fits, with the nearest changes after which something does;
            SC120 where the cluster has fewer GPUs.
    """
    pricer = Pricer(model, cluster, run, FrozenMap(outputs or {}))
    count = cluster.gpus if gpus is None else gpus
    if count > cluster.gpus:
        raise too_few_gpus(cluster, count)
    chosen = space or Space()
    if not run.trains:
        chosen = replace(chosen, checkpoint=("none",), loss_chunks=(1,))
    for padding in (False, True):
        limits = pricer.limits(padding=padding)
        ranking = rank(count, limits, chosen, pricer.within(limits, chosen), cluster, keep=keep)
        if ranking.ranked:
            best = ranking.ranked[0]
            return Found(
                pricer=pricer,
                gpus=count,
                ranked=ranking.ranked,
                reasons=reasons_for(best, pricer, chosen),
                runner_up=_runner_up(ranking.ranked, pricer),
                counts=ranking.counts,
                space=size_of(count, limits, chosen, cluster),
                notes=tuple(notes_of(ranking.ranked, pricer)),
            )
    raise nothing_fits(pricer, chosen, count)


def _runner_up(ranked: tuple[Ranked[Estimate], ...], pricer: Pricer) -> Difference | None:
    if len(ranked) == 1:
        return None
    best, second = (item.composition for item in ranked[:2])
    return difference(
        (best.to_plan(pricer.outputs), second.to_plan(pricer.outputs)),
        (ranked[0].price, ranked[1].price),
        (pricer.bytes_by_axis(best), pricer.bytes_by_axis(second)),
    )
