"""What the ranking does not know: said with every result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from seqcomp.cost.balance import uneven
from seqcomp.cost.estimate import Estimate
from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.plan.legality import nearest_lengths
from seqcomp.search.pricing import Pricer
from seqcomp.search.rank import Ranked

CLOSE = 0.05
"""Plans whose times differ by less are as good as each other to the cost model."""

FULL = 0.95
"""Beyond this share of a GPU's memory a plan may fail to fit after all."""


def notes_of(ranked: tuple[Ranked[Estimate], ...], pricer: Pricer) -> Iterator[Diagnostic]:
    """SC421, SC422: what is left out, what was not tried; SC417: of what is ranked; SC423,
    SC424, SC418, SC412: the best."""
    best = ranked[0]
    cluster = pricer.cluster
    yield diagnostic(
        "SC421",
        where=cluster.name,
        message="the times know two links, within a node and between nodes, for one job alone: "
        "no other traffic, no switches, rails or oversubscription beyond these, no stragglers, "
        f"no reading of data, no saving of checkpoints. {' '.join(cluster.notes)}".strip(),
        help="measure the first two plans before a long run",
    )
    yield diagnostic(
        "SC422",
        where="search",
        message="not tried: pipeline and expert parallelism, accumulation of gradients (a batch is "
        "one step), padded heads, overrides, offload; whether the code of the model compiles is "
        "not asked either",
        help="seqcomp explain PLAN --model M compiles it without GPUs",
    )
    left = [f for item in ranked for f in item.price.findings if f.code == "SC417"]
    yield from {f.message: replace(f, where="search") for f in left}.values()
    first, *others = [item.price.step_seconds for item in ranked]
    close = [item for item, t in zip(ranked[1:], others, strict=True) if t < first * (1 + CLOSE)]
    if close:
        yield diagnostic(
            "SC423",
            where="search",
            message=f"{len(close)} other set{'s' if len(close) > 1 else ''} of degrees "
            f"within {CLOSE:.0%} of the best: closer than the cost model is exact",
            found=tuple(str(item.composition.degrees) for item in close),
            help="measure them, or take the simplest",
        )
    price = best.price
    if price.peak_bytes > FULL * price.capacity:
        yield diagnostic(
            "SC424",
            where="search",
            message=f"the best holds {price.peak_bytes / price.capacity:.1%} of a GPU's memory, "
            "without the work space of kernels and collectives and without fragments",
            help="keep at hand a plan that keeps less: another checkpoint, or more loss_chunks",
        )
    yield from uneven(
        pricer.resolved(best.composition), pricer.model, pricer.run_of(best.composition)
    )
    if best.composition.padded:
        given, factor = pricer.run.seq_len, best.composition.factor
        yield diagnostic(
            "SC412",
            where="search",
            message=f"no composition that fits divides {given} tokens: "
            f"they are padded to {-(-given // factor) * factor}",
            found=given,
            legal=nearest_lengths(given, factor),
            help=f"use a multiple of {factor}, and no padding",
        )
