"""What one rank sends in one step, from the plan and the model's shape alone.

The same rows as of ``explain``'s report, which reads them off the lowered graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from seqcomp.cost.run import ELEMENT_BYTES, Run
from seqcomp.cost.shape import Apart, Block, ModelShape
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.layout.travel import travel_of
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.strategies.base import AttentionShape, CommStep, Kind, Phase, part
from seqcomp.strategies.compose import attention_steps
from seqcomp.strategies.data import Fsdp
from seqcomp.strategies.megatron_sp import MegatronSp


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of an element: of activations, of parameters as kept, of parameters as gathered."""

    activation: int
    kept: int
    gathered: int

    @property
    def gradient(self) -> int:
        """As gradients are summed."""
        return max(self.kept, 4)


def padded(plan: ResolvedPlan, model: ModelShape, run: Run) -> Run:
    """The run as ranks see it: with the tokens that fill the sequence up."""
    return run.with_length(layout_of(plan, model, run).padded(run.seq_len))


def layout_of(plan: ResolvedPlan, model: ModelShape, run: Run) -> SequenceLayout:
    """As ranks choose it: a mask that depends on documents is no causal one to ``auto``."""
    return plan.layout_for(run.seq_len, model.all_causal and run.packed is None)


def dtype_of(plan: ResolvedPlan, run: Run) -> tuple[str, int]:
    """In which a plan computes, by name and in bytes."""
    fsdp = plan.plan.strategies.fsdp
    name = run.dtype if fsdp is None or fsdp.mixed_precision == "none" else fsdp.mixed_precision
    return name, ELEMENT_BYTES[name]


def widths_of(plan: ResolvedPlan, run: Run) -> Widths:
    """``fsdp: mixed_precision`` keeps weights in the dtype that the model has."""
    computes = dtype_of(plan, run)[1]
    return Widths(computes, run.element_bytes, computes)


@dataclass(frozen=True, slots=True)
class BlockSteps:
    """What one block of a group sends: ``tensor`` and ``attention`` as their strategies have it,
    ``again`` in backward where checkpoints run it a second time, ``parameters`` for its weights."""

    tensor: tuple[CommStep, ...]
    attention: tuple[CommStep, ...]
    again: tuple[CommStep, ...]
    parameters: tuple[CommStep, ...]

    @property
    def all(self) -> tuple[CommStep, ...]:
        return (*self.tensor, *self.attention, *self.again, *self.parameters)


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
    found = Workload(blocks, tuple(_ends(plan, model, run, given)))
    return found if run.trains else _forward(found)


def _forward(work: Workload) -> Workload:
    def kept(steps: Iterable[CommStep]) -> tuple[CommStep, ...]:
        return tuple(s for s in steps if s.phase == "forward")

    return Workload(
        tuple(
            BlockSteps(kept(b.tensor), kept(b.attention), (), kept(b.parameters))
            for b in work.blocks
        ),
        tuple((where, s) for where, s in work.ends if s.phase == "forward"),
    )


# --- blocks ----------------------------------------------------------------------------------


def _block(plan: ResolvedPlan, model: ModelShape, block: Block, run: Run) -> BlockSteps:
    width = widths_of(plan, run)
    shape = block.attention(run.batch, run.seq_len, width.activation, model.hidden)
    tensor = _tensor(plan, block, shape)
    attention = attention_of(plan, model, block, run, layout_of(plan, model, run))
    keys = tuple(_of_keys(plan, block, shape))
    checkpoint = plan.plan.memory.checkpoint
    again: tuple[CommStep, ...] = ()
    if run.trains and checkpoint != "none":
        keeps = checkpoint == "selective"
        tensor, again = _again(tensor, attention, keeps=keeps, whole=block.ends_in_norm)
        again += tuple(replace(s, phase="backward") for s in keys if s.phase == "forward")
    return BlockSteps(tensor, (*attention, *keys), again, _of_parameters(plan, block, width, run))


def attention_of(
    plan: ResolvedPlan, model: ModelShape, block: Block, run: Run, layout: SequenceLayout
) -> tuple[CommStep, ...]:
    """What the busiest rank of a ring sends inside one attention of a padded run."""
    shape = block.attention(run.batch, run.seq_len, widths_of(plan, run).activation, model.hidden)
    travel = travel_of(run.mask(block.rule), layout, run.seq_len)
    ring_rank = 0 if travel is None else travel.busiest
    return attention_steps(plan, shape, travel=travel, ring_rank=ring_rank)


def _tensor(plan: ResolvedPlan, block: Block, shape: AttentionShape) -> tuple[CommStep, ...]:
    """What Megatron-SP sends, exchange by exchange in their order: in backward the gradient of a
    part of the block, then its input. Experts alone take no part."""
    degree = plan.ring_size * plan.ulysses_size
    strategy = MegatronSp(plan.tensor_size, plan.tensor_axis or "tensor")
    steps = strategy.comm_steps(shape.on_sequence_rank(degree))
    if not steps:
        return ()
    gather, scatter, back, give = (_of_one(step) for step in steps)
    into, again, out = gather, back, give
    if block.latent is not None:
        # Queries and keys are gathered in their latent widths; no weight sees the turned keys.
        widths = (block.latent.queries or shape.hidden, block.latent.keys)
        every = (*widths, block.latent.rotary)
        into, out = (_in_widths(step, every, shape.hidden) for step in (gather, give))
        again = _in_widths(back, widths, shape.hidden)
    if block.token_local:
        return into, scatter, back, again, out
    return into, gather, scatter, scatter, back, back, back, again, give, out


def _of_keys(plan: ResolvedPlan, block: Block, shape: AttentionShape) -> Iterator[CommStep]:
    """Keys that tensor ranks scale by tokens; on sequence ranks the tokens are shared already."""
    t, norm = plan.tensor_size, block.key_norm
    if norm is None or not norm.weighted or t <= block.kv_heads or plan.sequence_size > t:
        return
    sent = shape.kv_heads * shape.head_dim * shape.element_bytes
    sent *= (t - 1) * shape.batch * shape.length // t
    axis = plan.tensor_axis or "tensor"
    yield CommStep("all_gather", axis, sent, 1, "forward", False)
    yield CommStep("reduce_scatter", axis, sent, 1, "backward", False)


def _of_one(step: CommStep) -> CommStep:
    return replace(step, count=1, bytes_sent=step.bytes_sent // step.count)


def _in_widths(step: CommStep, widths: Sequence[int], hidden: int) -> CommStep:
    """Tensors of these widths in place of one of ``hidden``."""
    sent = sum(step.bytes_sent * width // hidden for width in widths)
    return replace(step, count=len(widths), bytes_sent=sent)


def _again(
    tensor: tuple[CommStep, ...], attention: tuple[CommStep, ...], *, keeps: bool, whole: bool
) -> tuple[tuple[CommStep, ...], tuple[CommStep, ...]]:
    """What Megatron-SP sends beside a second run, and what that run sends.

    It gathers once, for itself and for the gradients of weights, and ends before the last
    reduce-scatter, unless the `whole` block needs what that gives. With ``keeps`` results of
    attention and of reduce-scatters are there.
    """

    def of(kind: Kind, phase: Phase) -> list[CommStep]:
        return [step for step in tensor if (step.kind, step.phase) == (kind, phase)]

    gathers, scatters = of("all_gather", "forward"), of("reduce_scatter", "forward")
    gradients = of("all_gather", "backward")[::2]
    beside = (*gathers, *scatters, *gradients, *of("reduce_scatter", "backward"))
    again = list(gathers)
    if not keeps:
        again += scatters if whole else scatters[:1]
        again += [step for step in attention if step.phase == "forward"]
    return beside, tuple(replace(step, phase="backward") for step in again)


# --- parameters ------------------------------------------------------------------------------


def _of_parameters(
    plan: ResolvedPlan, block: Block, width: Widths, run: Run
) -> tuple[CommStep, ...]:
    p, t = block.parameters, plan.tensor_size
    alone = p.norms + p.experts + p.whole + p.fused
    alone += p.kv - p.fused_kv if t > block.kv_heads else 0
    cut = p.on_tensor_rank(t, block.kv_heads) + p.experts + p.norms + p.whole - alone
    return tuple(parameter_steps(plan, cut, alone, width, run, root=False))


def parameter_steps(
    plan: ResolvedPlan, cut: int, alone: int, width: Widths, run: Run, *, root: bool
) -> Iterator[CommStep]:
    """For parameters of one place, as many as a tensor rank holds: ``cut`` ones and whole ones.

    root: kept gathered from forward to backward under fsdp.
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
        learnt = held * wide if run.trains else 0
        yield from fsdp.gradient_steps(held * width.gathered, learnt)
        if plan.tensor_size > 1:
            yield from _summed(plan, (plan.tensor_axis or "",), alone * wide)
        return
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


# --- embedding, head, loss -------------------------------------------------------------------


def _ends(
    plan: ResolvedPlan, model: ModelShape, run: Run, given: int
) -> Iterator[tuple[str, CommStep]]:
    """given: length of the sequence without what fills it up."""
    width = widths_of(plan, run)
    t, axis = plan.tensor_size, plan.tensor_axis or "tensor"
    tokens = run.batch * run.seq_len // (plan.ring_size * plan.ulysses_size)
    if t > 1:
        size = part((t - 1) * tokens * model.hidden * width.activation, t)
        if model.embedding:
            yield "embedding", CommStep("reduce_scatter", axis, size, 1, "forward", False)
            yield "embedding", CommStep("all_gather", axis, size, 1, "backward", False)
        if run.trains and model.vocab:
            yield "head", CommStep("all_gather", axis, size, 1, "forward", False)
            yield "head", CommStep("reduce_scatter", axis, size, 1, "backward", False)
            yield "head", CommStep("all_gather", axis, size, 1, "backward", False)
    if run.trains and model.vocab:
        for step in _loss(plan, tokens):
            yield "loss", step
        if outputs_of(plan) == "full":
            whole = run.batch * given * model.vocab * width.activation
            for step in _gathered_logits(plan, tokens * model.vocab * width.activation, whole):
                yield "logits", step
    if run.trains and not model.vocab:
        yield from _gathered_states(plan, run.batch * run.seq_len * model.hidden * width.activation)
    words, other = root_parameters(plan, model)
    for step in parameter_steps(plan, words, other, width, run, root=True):
        yield "gradients", step
    for one in apart_of(plan, model):
        for step in parameter_steps(plan, -(-one.words // t), one.other, width, run, root=False):
            again = step.kind == "all_gather" and step.phase == "backward"
            yield "gradients" if one.first and not again else "behind", step


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


def _loss(plan: ResolvedPlan, tokens: int) -> Iterator[CommStep]:
    """Vocabulary-parallel cross-entropy in fp32 (maximum, sum and target; one gradient), the sum
    over all tokens, and over data ranks their count."""
    t, axis, wide = plan.tensor_size, plan.tensor_axis or "tensor", 4
    if t > 1:
        one = 2 * (t - 1) * tokens * wide // t
        yield CommStep("all_reduce", axis, 3 * one, 2, "forward", False)
        yield CommStep("all_reduce", axis, one, 1, "backward", False)
    every = tuple(a for a, n in plan.axes.items() if n > 1 and a != plan.tensor_axis)
    for axes in (every, tuple(a for a in every if a in plan.batch_axes)):
        degree = math.prod(plan.axes[a] for a in axes)
        if degree > 1:
            sent = 2 * (degree - 1) * wide // degree
            yield CommStep("all_reduce", "+".join(axes), sent, 1, "forward", False)


def _gathered_logits(plan: ResolvedPlan, size: int, whole: int) -> Iterator[CommStep]:
    """Over ring and ulysses, then over the vocabulary; ``size``: of a tensor group's tokens,
    ``whole``: of all but those that fill the sequence up, which are cut off in between."""
    axes = tuple(
        a
        for a, n in plan.axes.items()
        if n > 1 and a in plan.sequence_axes and a != plan.tensor_axis
    )
    degree, t = math.prod(plan.axes[a] for a in axes), plan.tensor_size
    kind: Kind = "all_gather"
    if degree > 1:
        yield CommStep(kind, "+".join(axes), (degree - 1) * (size // t), 1, "forward", False)
    if t > 1:
        sent = (t - 1) * (whole // t)
        yield CommStep(kind, plan.tensor_axis or "tensor", sent, 1, "forward", False)


def _gathered_states(plan: ResolvedPlan, size: int) -> Iterator[tuple[str, CommStep]]:
    """What a model without a head gives, over all axes of the sequence; ``size``: of all tokens."""
    mode: Mapping[str, str] = plan.plan.outputs
    axes = tuple(a for a in plan.sequence_axes if plan.axes[a] > 1)
    degree = math.prod(plan.axes[a] for a in axes)
    if degree > 1 and mode.get("last_hidden_state", "full") == "full":
        sent = (degree - 1) * (size // degree)
        yield "states", CommStep("all_gather", "+".join(axes), sent, 1, "forward", False)


def outputs_of(plan: ResolvedPlan) -> str:
    """How logits are returned; loss chunks make none."""
    return "drop" if plan.plan.memory.loss_chunks > 1 else wanted_outputs(plan)


def wanted_outputs(plan: ResolvedPlan) -> str:
    """How the plan says that logits are returned, by the names that models give them."""
    modes: Mapping[str, str] = plan.plan.outputs
    return next((modes[name] for name in ("logits", "output") if name in modes), "full")
