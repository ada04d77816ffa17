"""Which ring rank has most to do in attention, and which layout would share it out better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from seqcomp.cost.rounds import rounds_of
from seqcomp.cost.run import Run
from seqcomp.cost.shape import Block, ModelShape
from seqcomp.cost.widths import layout_of, padded
from seqcomp.cost.workload import attention_of
from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.layout.intervals import balance_of, work
from seqcomp.layout.sequence import Layout, SequenceLayout
from seqcomp.layout.travel import travel_of
from seqcomp.plan.resolve import ResolvedPlan

UNEVEN, BETTER = 1.1, 0.95
"""What is said: the busiest rank over the mean, and of that at most where another layout helps."""

BY_CAUSAL_MASKS = ("SC207", "SC208")
"""Findings of plans that know of no documents: of what is causal or not over the whole sequence."""


@dataclass(frozen=True, slots=True)
class Busiest:
    """Ranks along the ring, of the first group of blocks: which attends to most pairs, which sends
    most keys (and gradients of keys). None where all are alike."""

    attends: int | None = None
    sends: int | None = None

    def to_json(self) -> dict[str, int | None]:
        """A dict of JSON values with exactly the fields of this class."""
        return {"attends": self.attends, "sends": self.sends}


def busiest_of(plan: ResolvedPlan, model: ModelShape, run: Run) -> Busiest:
    """See `Busiest`; ``run`` as ranks see it, padded."""
    block = next((b for b in model.blocks if not b.source), None)
    if plan.ring_size == 1 or block is None:
        return Busiest()
    mask, layout = run.mask(block.rule), layout_of(plan, model, run)
    travel = travel_of(mask, layout, run.seq_len)
    sends = travel.busiest if travel is not None and travel.steps else None
    return Busiest(rounds_of(mask, layout, run.seq_len).rank, sends)


def uneven(plan: ResolvedPlan, model: ModelShape, run: Run) -> Iterator[Diagnostic]:
    """SC418, of the block whose work is shared out worst, where documents or windows are why (what
    is causal over the whole sequence is known to the plan: SC207)."""
    run = padded(plan, model, run)
    blocks = [b for b in model.blocks if run.packed is not None or b.mask == "window"]
    if plan.ring_size == 1 or not blocks:
        return
    length, used = run.seq_len, layout_of(plan, model, run)
    areas, block = max(
        ((work(run.mask(b.rule), used, length), b) for b in blocks),
        key=lambda item: balance_of(item[0]),
    )
    balance, mask = balance_of(areas), run.mask(block.rule)
    if balance < UNEVEN:
        return
    others = {
        layout: balance_of(work(mask, layout, length))
        for layout in _others(used)
        if length % layout.factor == 0
    }
    better = [layout for layout, value in others.items() if value <= BETTER * balance]
    what = f"documents of {run.packed}" if run.packed else f"a window of {block.window}"
    rank = max(range(len(areas)), key=areas.__getitem__)
    yield diagnostic(
        "SC418",
        where=plan.plan.where("strategies", "ring", "layout"),
        message=f"ring rank {rank} attends to {balance:.2f} times as many pairs as ranks do on "
        f"average ({what[:100]})",
        found=f"{used.kind}: {balance:.2f}",
        legal=tuple(f"{layout.kind}: {value:.2f}" for layout, value in others.items()),
        help=_help(plan, model, run, block, used, min(better, key=others.__getitem__))
        if better
        else "no layout shares it out better: a smaller ring (beside ulysses or data ranks), or "
        "documents packed in another order",
    )


def _others(used: SequenceLayout) -> Iterator[SequenceLayout]:
    kinds: tuple[Layout, ...] = ("zigzag", "striped", "contiguous")
    for kind in kinds:
        if kind != used.kind:
            yield replace(used, kind=kind)


def _help(
    plan: ResolvedPlan,
    model: ModelShape,
    run: Run,
    block: Block,
    used: SequenceLayout,
    best: SequenceLayout,
) -> str:
    def sent(layout: SequenceLayout) -> str:
        steps = attention_of(plan, model, block, run, layout)
        ring = sum(s.bytes_sent for s in steps if s.axis == plan.ring_axis and s.phase == "forward")
        return f"{ring / 2**20:.4g} MiB"

    return (
        f"layout: {best.kind}; a layer's forward then sends {sent(best)} along the ring, "
        f"{sent(used)} now"
    )
