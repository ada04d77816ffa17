"""What a decoder attends to beside its own tokens: those of an encoder.

They are as many as the run's and lie on the ranks as those do, or the model makes another number of
them itself, as of speech: then every rank of the sequence has all of them, and ring and ulysses
divide nothing of what is done with them (SC402 of a compiled model). Megatron-SP cuts that by heads
and features, and adds it up on all of its ranks in place of gathers and scatters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.plan.resolve import ResolvedPlan

if TYPE_CHECKING:
    from seqcomp.cost.run import Run
    from seqcomp.cost.shape import Block


def undivided(plan: ResolvedPlan) -> ResolvedPlan:
    """The plan as a rank sees it whose ring and ulysses divide nothing."""
    axes = {
        axis: 1 if axis in (plan.ring_axis, plan.ulysses_axis) else size
        for axis, size in plan.axes.items()
    }
    return replace(plan, axes=FrozenMap(axes))


def seen_by(plan: ResolvedPlan, block: Block, run: Run) -> tuple[ResolvedPlan, Run]:
    """Plan and run as a block sees them: of its own sequence where it has one."""
    if not block.source:
        return plan, run
    return undivided(plan), replace(run, seq_len=block.source, documents=None)


def source_tokens(block: Block, run: Run) -> int:
    """Of one sequence that the second attention of a block gets its keys from."""
    assert block.cross is not None
    return block.cross.source or run.seq_len
