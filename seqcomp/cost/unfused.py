"""Attention that no fused kernel with causal tiles computes: what it reads, writes and holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from seqcomp.cost.rounds import Rounds, Tiles, merged
from seqcomp.cost.run import Run
from seqcomp.cost.shape import Block, ModelShape
from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.plan.resolve import ResolvedPlan


@dataclass(frozen=True, slots=True)
class Written:
    """Scores that plain operations write down and read again.

    forward, backward: how often a number of each pair and head is read or written. ``wide``: in
    fp32 whatever the model computes in, tile by tile; else all pairs at once.
    """

    forward: int
    backward: int
    wide: bool


def written(plan: ResolvedPlan, block: Block, run: Run) -> Written | None:
    """None where a fused kernel computes. Tiles take softcaps and dropout, and values of another
    width than keys, to plain operations (runtime/attention/math_kernel.py); whole attention sinks,
    too (capture/recognise.py). Passes are counted on these."""
    capped = block.scores > 1
    if is_tiled(plan, block, run):
        if capped:
            return Written(21, 33, wide=True)
        narrow = block.value_dim not in (0, block.head_dim)
        return Written(11, 20, wide=True) if narrow else None
    if not block.scores:
        return None
    return Written(14, 18, wide=False) if capped else Written(10, 13, wide=False)


def is_tiled(plan: ResolvedPlan, block: Block, run: Run) -> bool:
    """Whether attention runs tile by tile: where an axis divides the sequence there, under masks
    that depend on data, and with dropout."""
    divided = plan.ring_size * plan.ulysses_size > 1
    return divided or run.packed is not None or block.tiled


def attends_again(plan: ResolvedPlan, block: Block, run: Run) -> bool:
    """Whether a second run under ``checkpoint: selective`` attends again: what is kept is what a
    kernel gave."""
    return block.scores > 0 and not is_tiled(plan, block, run)


def takes_dense_mask(plan: ResolvedPlan, block: Block, run: Run) -> bool:
    """Whether torch attends with a mask of all pairs: windows in whole attention."""
    return block.mask == "window" and not is_tiled(plan, block, run)


def mask_bytes(run: Run, element: int) -> int:
    """Of a mask of all pairs, the same for all heads."""
    return element * run.batch * run.seq_len**2


def held_masks(plan: ResolvedPlan, model: ModelShape, run: Run, element: int) -> int:
    """Bytes of the masks of all pairs that all blocks share: of windows as they are made, and of
    attention that is written out as they go into blocks that run again, to be added."""
    again = run.trains and plan.plan.memory.checkpoint != "none"
    added = {
        (b.mask, b.window)
        for b in model.blocks
        if again and attends_again(plan, b, run) and b.mask != "full"
    }
    made = any(
        takes_dense_mask(plan, b, run) and (b.mask, b.window) not in added for b in model.blocks
    )
    own = mask_bytes(run, 1 if run.trains else 1 + element) if made else 0
    return own + len(added) * mask_bytes(run, element)


def computed(
    work: Rounds, plan: ResolvedPlan, block: Block, run: Run, layout: SequenceLayout
) -> Rounds:
    """With the pairs that plain operations and dense masks compute beside the visible ones:
    triangles as squares, or all pairs."""
    if not is_tiled(plan, block, run):
        every = ((float(run.seq_len**2), 1.0),)
        return Rounds((every,), every)
    if block.mask in ("full", "data"):
        return work
    if layout.ring > 1 and layout.kind == "striped":
        return Rounds(tuple(map(_squares, work.each)), _squares(work.whole), work.rank)
    own, *others = work.each
    return Rounds((_squares(own), *others), merged((work.whole, own)), work.rank)


def _squares(tiles: Tiles) -> Tiles:
    return tuple((2 * pairs, count) for pairs, count in tiles)


def dense_masks(plan: ResolvedPlan, model: ModelShape, run: Run) -> Iterator[Diagnostic]:
    """SC425, once."""
    dense = [b for b in model.blocks if takes_dense_mask(plan, b, run)]
    if not dense:
        return
    size, count = mask_bytes(run, run.element_bytes), sum(b.count for b in dense)
    kept = "kept by each of" if run.trains and plan.plan.memory.checkpoint == "none" else "made in"
    yield diagnostic(
        "SC425",
        where=plan.plan.where("strategies"),
        message=f"no axis divides attention: windows of {dense[0].window} are given to torch as a "
        f"mask of all {run.seq_len} x {run.seq_len} pairs, {size / 2**20:.4g} MiB {kept} {count} "
        "layers, and all pairs are computed",
        help="ring or ulysses attends in tiles, within the window alone",
    )
