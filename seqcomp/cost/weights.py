"""What is sent for parameters: gathered shards, and sums of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

from seqcomp.cost.run import Run
from seqcomp.cost.shape import Apart, ModelShape
from seqcomp.cost.widths import Widths
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.strategies.base import CommStep
from seqcomp.strategies.data import Fsdp


def parameter_steps(
    plan: ResolvedPlan,
    cut: int,
    alone: int,
    width: Widths,
    run: Run,
    *,
    root: bool,
    frozen: int = 0,
) -> Iterator[CommStep]:
    """For parameters of one place, as many as a tensor rank holds: ``cut`` ones and whole ones.

    root: kept gathered from forward to backward under fsdp. frozen: of the whole ones, not trained.
    """
    wide = width.gradient
    shards, replicas = sharding(plan)
    if shards:
        ways, copies = (math.prod(plan.axes[a] for a in axes) for axes in (shards, replicas))
        strategy = plan.plan.strategies.fsdp
        assert strategy is not None
        fsdp = Fsdp(
            ways,
            "+".join(shards),
            reshard=strategy.reshard and not root and run.trains,
            replicas=copies,
            replica_axis="+".join(replicas),
        )
        held = -(-(cut + alone) // ways) * ways
        learnt = (held - frozen // ways * ways) * wide if run.trains else 0
        yield from fsdp.gradient_steps(held * width.gathered, learnt)
        if plan.tensor_size > 1:
            yield from _summed(plan, (plan.tensor_axis or "",), (alone - frozen) * wide)
        return
    alone -= frozen
    every = tuple(a for a, n in plan.axes.items() if n > 1)
    rest = tuple(a for a in every if a != plan.tensor_axis)
    if every == rest:
        yield from _summed(plan, every, (cut + alone) * wide)
        return
    yield from _summed(plan, rest, cut * wide)
    yield from _summed(plan, every, alone * wide)


def _summed(plan: ResolvedPlan, axes: tuple[str, ...], size: int) -> Iterator[CommStep]:
    degree = math.prod(plan.axes[a] for a in axes)
    if degree > 1 and size:
        sent = 2 * (degree - 1) * size // degree
        yield CommStep("all_reduce", "+".join(axes), sent, 1, "backward", True)


def sharding(plan: ResolvedPlan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Axes over which fsdp shards parameters, and over which the shards are copied; () without.

    In mesh order, without axes of size 1 where there are others.
    """
    if not plan.fsdp_axes:
        return (), ()
    rest = (*plan.batch_axes, *plan.sequence_axes)
    wide = tuple(a for a, size in plan.axes.items() if size > 1 and a != plan.tensor_axis)
    return (
        tuple(a for a in wide if a in plan.fsdp_axes) or plan.fsdp_axes[:1],
        tuple(a for a in wide if a in rest and a not in plan.fsdp_axes),
    )


def apart_of(plan: ResolvedPlan, model: ModelShape) -> tuple[Apart, ...]:
    """What fsdp gathers by itself outside of the blocks: not a head that runs in loss chunks, of
    which the root is called."""
    if not sharding(plan)[0]:
        return ()
    chunks = plan.plan.memory.loss_chunks > 1
    return tuple(one for one in model.apart if one.first or not (one.words and chunks))


def root_parameters(plan: ResolvedPlan, model: ModelShape) -> tuple[int, int]:
    """Outside of the blocks and not apart, what one tensor rank holds cut by vocabulary, and
    whole."""
    apart = apart_of(plan, model)
    words = model.embedding + model.head - sum(one.words for one in apart)
    return -(-words // plan.tensor_size), model.other - sum(one.other for one in apart)
