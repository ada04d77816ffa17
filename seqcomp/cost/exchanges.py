"""What Megatron-SP sends in one block, exchange by exchange, also where it runs again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from seqcomp.cost.shape import Block
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.strategies.base import AttentionShape, CommStep
from seqcomp.strategies.megatron_sp import MegatronSp


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Of each part that Megatron-SP cuts (attentions, MLP), in the order of the forward: ``into``
    it, the ``sums`` behind it, and in backward the ``gradients`` of those, its inputs ``again`` for
    the gradients of weights, and what it ``gives`` back."""

    into: tuple[CommStep, ...] = ()
    sums: tuple[CommStep, ...] = ()
    gradients: tuple[CommStep, ...] = ()
    again: tuple[CommStep, ...] = ()
    gives: tuple[CommStep, ...] = ()

    @property
    def all(self) -> tuple[CommStep, ...]:
        """Of each kind and phase in the order in which they are sent."""
        back = list(self.gradients)
        if self.again:
            parts = zip(self.again, self.gradients, strict=True)
            back = [step for part in parts for step in part]
        return (*self.into, *self.sums, *back[::-1], *self.gives[::-1])


def exchanges_of(plan: ResolvedPlan, block: Block, shape: AttentionShape) -> Exchanges:
    """Experts alone take no part, and what the keys of a second attention are made of is gathered
    for all blocks at once. shape: of the block's own sequence."""
    degree = plan.ring_size * plan.ulysses_size
    strategy = MegatronSp(plan.tensor_size, plan.tensor_axis or "tensor")
    steps = strategy.comm_steps(shape.on_sequence_rank(degree))
    if not steps:
        return Exchanges()
    parts = (0 if block.by_tokens else block.attentions) + (not block.token_local)
    if block.source:
        whole = _of_one(steps[0])
        summed = replace(whole, kind="all_reduce", bytes_sent=2 * whole.bytes_sent)
        return Exchanges(sums=parts * (summed,), gives=parts * (replace(summed, phase="backward"),))
    gather, scatter, back, give = (_of_one(step) for step in steps)
    into, again, gives = ([step] * parts for step in (gather, back, give))
    if block.latent is not None:
        # Queries and keys are gathered in their latent widths; no weight sees the turned keys.
        widths = (block.latent.queries or shape.hidden, block.latent.keys)
        every = (*widths, block.latent.rotary)
        into[0], gives[0] = (_in_widths(step, every, shape.hidden) for step in (gather, give))
        again[0] = _in_widths(back, widths, shape.hidden)
    return Exchanges(tuple(into), parts * (scatter,), parts * (back,), tuple(again), tuple(gives))


def run_again(
    first: Exchanges,
    block: Block,
    attention: Sequence[CommStep],
    *,
    keeps: bool,
) -> tuple[tuple[CommStep, ...], tuple[CommStep, ...]]:
    """What Megatron-SP sends beside a second run of the block, and what that run sends.

    It gathers once, for itself and for the gradients of weights, and ends before the last sum,
    unless the block needs what that gives. With ``keeps`` results of attention and of sums are
    there.
    """
    again = list(first.into)
    if not keeps:
        inner = len(first.sums) - (not block.token_local)
        again += first.sums if block.ends_in_norm else first.sums[:inner]
        again += [step for step in attention if step.phase == "forward"]
    beside = replace(first, again=()) if first.into else first
    return beside.all, tuple(replace(step, phase="backward") for step in again)


def turned(plan: ResolvedPlan, block: Block, shape: AttentionShape) -> tuple[CommStep, ...]:
    """Of attention whose linears run by tokens: queries, keys and values go to the ranks of their
    heads (keys and values to all where there are fewer heads than ranks), and its output back."""
    t, axis = plan.tensor_size, plan.tensor_axis or "tensor"
    if not block.by_tokens or t == 1:
        return ()
    tokens = shape.batch * shape.length // (t * plan.ring_size * plan.ulysses_size)
    one = (t - 1) * tokens * shape.element_bytes
    keys = shape.kv_heads * shape.kv_head
    spread = t > shape.kv_heads
    moved = one * (shape.width + (0 if spread else keys)) // t
    turns = CommStep("all_to_all", axis, moved, 1 if spread else 3, "forward", False)
    back = CommStep("all_gather", axis, one * shape.value_width, 1, "forward", False)
    steps = [turns, replace(turns, phase="backward"), back]
    steps.append(replace(back, kind="reduce_scatter", phase="backward"))
    if spread:
        whole = CommStep("all_gather", axis, one * keys, 2, "forward", False)
        steps += [whole, replace(whole, kind="reduce_scatter", phase="backward")]
    return tuple(steps)


def of_keys(plan: ResolvedPlan, block: Block, shape: AttentionShape) -> Iterator[CommStep]:
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
