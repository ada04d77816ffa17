"""``search``: the fastest plan for a model, a cluster and a run, with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from seqcomp.cost.estimate import Estimate
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.hardware.cluster import Cluster
from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.plan.schema import OutputMode, Plan
from seqcomp.search.diff import Difference, difference
from seqcomp.search.feasible import Change, changes, least_memory
from seqcomp.search.notes import notes_of
from seqcomp.search.pricing import Pricer
from seqcomp.search.rank import Counts, Ranked, rank
from seqcomp.search.reasons import Reason, reasons_for
from seqcomp.search.space import Space, all_degrees, size_of


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
        PlanError: SC651 where nothing fits, with the nearest changes after which something does;
            SC652 where no composition is legal, or the cluster is too small.
    """
    pricer = Pricer(model, cluster, run, FrozenMap(outputs or {}))
    count = cluster.gpus if gpus is None else gpus
    if count > cluster.gpus:
        raise PlanError(
            diagnostic(
                "SC652",
                where="gpus",
                message=f"{cluster.name} has {cluster.gpus} GPUs",
                found=count,
                legal=f"1 to {cluster.gpus}",
            )
        )
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
    raise _nothing(pricer, chosen, count)


def _runner_up(ranked: tuple[Ranked[Estimate], ...], pricer: Pricer) -> Difference | None:
    if len(ranked) == 1:
        return None
    best, second = (item.composition for item in ranked[:2])
    return difference(
        (best.to_plan(pricer.outputs), second.to_plan(pricer.outputs)),
        (ranked[0].price, ranked[1].price),
        (pricer.bytes_by_axis(best), pricer.bytes_by_axis(second)),
    )


def _nothing(pricer: Pricer, space: Space, gpus: int) -> PlanError:
    """SC651 or SC652: what is missing, and what would do."""
    run = pricer.run
    what = f"one step of {pricer.model.name} at {run.seq_len} tokens and batch {run.batch}"
    least = least_memory(pricer, space, gpus)
    if least is None:
        legal = tuple(n for n in range(1, 2 * gpus + 1) if _is_legal(n, pricer))
        below = [n for n in legal if n < gpus][-2:]
        above = [n for n in legal if n > gpus][:2]
        return PlanError(
            diagnostic(
                "SC652",
                where="gpus",
                message=f"no composition divides {what} among exactly {gpus} GPUs",
                found=gpus,
                legal=(*below, *above),
                help="use one of these numbers of GPUs, or a batch that they divide",
            )
        )
    memory = pricer.cluster.device.memory
    most = max(least.price.memory, key=lambda row: row.bytes)
    ways = [_way(change) for change in changes(pricer, space, gpus)]
    return PlanError(
        diagnostic(
            "SC651",
            where=f"{gpus} x {pricer.cluster.device.name}",
            message=f"{what} does not fit: the composition that holds least, "
            f"{_described(least)}, needs {_gib(least.price.peak_bytes)} of "
            f"{_gib(memory)} on a GPU, {_gib(least.price.peak_bytes - memory)} too much "
            f"(most of it: {most.what}, {_gib(most.bytes)})",
            found=least.price.peak_bytes,
            legal=memory,
            help="; or ".join(ways) or "no number of GPUs, length or batch that was tried fits",
        )
    )


def _is_legal(gpus: int, pricer: Pricer) -> bool:
    return next(all_degrees(gpus, pricer.limits(padding=True)), None) is not None


def _way(change: Change) -> str:
    least = change.least
    words = {
        "gpus": f"use {change.value} GPUs",
        "seq_len": f"use a length of {change.value}",
        "batch": f"use a batch of {change.value}",
    }
    return f"{words[change.what]} ({_described(least)}: {_gib(least.price.peak_bytes)})"


def _described(item: Ranked[Estimate]) -> str:
    c = item.composition
    parts = [str(c.degrees)]
    if c.fsdp:
        parts.append("fsdp")
    if c.checkpoint != "none":
        parts.append(f"checkpoint {c.checkpoint}")
    if c.loss_chunks > 1:
        parts.append(f"{c.loss_chunks} loss chunks")
    return ", ".join(parts)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
