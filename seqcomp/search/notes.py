"""What the ranking does not know: said with every result."""

from __future__ import annotations

from collections.abc import Iterator

from seqcomp.cost.estimate import Estimate
from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.search.pricing import Pricer
from seqcomp.search.rank import Ranked

CLOSE = 0.05
"""Plans whose times differ by less are as good as each other to the cost model."""


def notes_of(ranked: tuple[Ranked[Estimate], ...], pricer: Pricer) -> Iterator[Diagnostic]:
    """SC421 what the times leave out, SC422 what was not tried, SC423 too close, SC412 padded."""
    best = ranked[0]
    cluster = pricer.cluster
    yield diagnostic(
        "SC421",
        where=cluster.name,
        message="the times know two links, within a node and between nodes, for one job alone: "
        "no other traffic, no switches, rails or oversubscription beyond these, no stragglers, "
        "no reading of data, no saving of checkpoints",
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
    if best.composition.padded:
        run = pricer.run_of(best.composition)
        yield diagnostic(
            "SC412",
            where="search",
            message=f"no composition that fits divides {pricer.run.seq_len} tokens: "
            f"they are padded to {run.seq_len}",
            found=pricer.run.seq_len,
            legal=run.seq_len,
            help=f"use a multiple of {best.composition.factor}, and no padding",
        )
