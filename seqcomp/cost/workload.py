"""What one rank sends in one step, from the plan and the model's shape alone.

The same rows as of ``explain``'s report, which reads them off the lowered graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from seqcomp.cost.exchanges import exchanges_of, of_keys, run_again, turned
from seqcomp.cost.outside import steps_outside
from seqcomp.cost.run import Run
from seqcomp.cost.shape import Block, ModelShape
from seqcomp.cost.source import seen_by
from seqcomp.cost.weights import parameter_steps
from seqcomp.cost.widths import Widths, layout_of, padded, widths_of
from seqcomp.layout.masks import Full, Mask
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.layout.travel import travel_of
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.strategies.base import CommStep, Phase
from seqcomp.strategies.compose import attention_steps


@dataclass(frozen=True, slots=True)
class BlockSteps:
    """What one block of a group sends: ``tensor`` and ``attention`` as their strategies have it,
    ``cross`` in its second attention, ``again`` in backward where checkpoints run it a second time,
    ``parameters`` for its weights."""

    tensor: tuple[CommStep, ...]
    attention: tuple[CommStep, ...]
    cross: tuple[CommStep, ...]
    again: tuple[CommStep, ...]
    parameters: tuple[CommStep, ...]

    @property
    def all(self) -> tuple[CommStep, ...]:
        return (*self.tensor, *self.attention, *self.cross, *self.again, *self.parameters)


@dataclass(frozen=True, slots=True)
class Workload:
    """Of one rank: steps of each group of blocks (of one block), and by place of all else."""

    blocks: tuple[BlockSteps, ...]
    ends: tuple[tuple[str, CommStep], ...]

    def bytes_sent(self, model: ModelShape, phase: Phase | None = None) -> int:
        """By one rank in one step."""
        steps = [
            (block.count, step)
            for block, own in zip(model.blocks, self.blocks, strict=True)
            for step in own.all
        ]
        steps += [(1, step) for _, step in self.ends]
        return sum(n * step.bytes_sent for n, step in steps if phase in (None, step.phase))


def workload_of(plan: ResolvedPlan, model: ModelShape, run: Run) -> Workload:
    """Of a training step, or of a prefill: then forward alone, and no logits are gathered."""
    given, run = run.seq_len, padded(plan, model, run)
    blocks = tuple(_block(plan, model, block, run) for block in model.blocks)
    found = Workload(blocks, tuple(steps_outside(plan, model, run, given)))
    return found if run.trains else _forward(found)


def _forward(work: Workload) -> Workload:
    def kept(steps: Iterable[CommStep]) -> tuple[CommStep, ...]:
        return tuple(s for s in steps if s.phase == "forward")

    return Workload(
        tuple(
            BlockSteps(kept(b.tensor), kept(b.attention), kept(b.cross), (), kept(b.parameters))
            for b in work.blocks
        ),
        tuple((where, s) for where, s in work.ends if s.phase == "forward"),
    )


def _block(plan: ResolvedPlan, model: ModelShape, block: Block, run: Run) -> BlockSteps:
    width, layout = widths_of(plan, run), layout_of(plan, model, run)
    over, own = seen_by(plan, block, run)
    shape = block.attention(own.batch, own.seq_len, width.activation, model.hidden)
    first = exchanges_of(over, block, shape)
    attention = () if block.source else attention_of(plan, model, block, run, layout)
    cross: tuple[CommStep, ...] = ()
    if block.cross is not None and not block.cross.source:
        cross = _attention(plan, model, block, run, layout, Full())
    keys = (*of_keys(over, block, shape), *turned(over, block, shape))
    checkpoint = plan.plan.memory.checkpoint
    tensor, again = first.all, tuple[CommStep, ...]()
    if run.trains and checkpoint != "none":
        keeps = checkpoint == "selective"
        tensor, again = run_again(first, block, (*attention, *cross), keeps=keeps)
        gone = "all_to_all" if keeps else ""  # what exchanges gave is kept
        sent = (s for s in keys if s.phase == "forward" and s.kind != gone)
        again += tuple(replace(s, phase="backward") for s in sent)
    parameters = _of_parameters(plan, block, width, run)
    return BlockSteps(tensor, (*attention, *keys), cross, again, parameters)


def attention_of(
    plan: ResolvedPlan, model: ModelShape, block: Block, run: Run, layout: SequenceLayout
) -> tuple[CommStep, ...]:
    """What the busiest rank of a ring sends inside one attention of a padded run."""
    return _attention(plan, model, block, run, layout, run.mask(block.rule))


def _attention(
    plan: ResolvedPlan,
    model: ModelShape,
    block: Block,
    run: Run,
    layout: SequenceLayout,
    mask: Mask,
) -> tuple[CommStep, ...]:
    shape = block.attention(run.batch, run.seq_len, widths_of(plan, run).activation, model.hidden)
    travel = travel_of(mask, layout, run.seq_len)
    ring_rank = 0 if travel is None else travel.busiest
    return attention_steps(plan, shape, travel=travel, ring_rank=ring_rank)


def _of_parameters(
    plan: ResolvedPlan, block: Block, width: Widths, run: Run
) -> tuple[CommStep, ...]:
    p, t = block.parameters, plan.tensor_size
    alone = p.norms + p.experts + p.whole + p.fused
    alone += p.kv - p.fused_kv if t > block.kv_heads else 0
    cut = p.on_tensor_rank(t, block.kv_heads) + p.experts + p.norms + p.whole - alone
    return tuple(parameter_steps(plan, cut, alone, width, run, root=p.with_root))
