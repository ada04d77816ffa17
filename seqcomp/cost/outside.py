"""What is sent outside of the blocks: of embedding, head, loss and outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.cost.weights import apart_of, parameter_steps, root_parameters
from seqcomp.cost.widths import widths_of
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.strategies.base import CommStep, Kind, part


def steps_outside(
    plan: ResolvedPlan, model: ModelShape, run: Run, given: int
) -> Iterator[tuple[str, CommStep]]:
    """given: length of the sequence without what fills it up."""
    width = widths_of(plan, run)
    t, axis = plan.tensor_size, plan.tensor_axis or "tensor"
    tokens = run.batch * run.seq_len // (plan.ring_size * plan.ulysses_size)
    if t > 1:
        size = part((t - 1) * tokens * model.hidden * width.activation, t)
        if model.embedding:
            for _ in range(model.sequences):
                yield "embedding", CommStep("reduce_scatter", axis, size, 1, "forward", False)
                yield "embedding", CommStep("all_gather", axis, size, 1, "backward", False)
        if model.sequences > 1:  # once for all blocks of the decoder
            yield "source", CommStep("all_gather", axis, size, 1, "forward", False)
            yield "source", CommStep("reduce_scatter", axis, size, 1, "backward", False)
            yield "source", CommStep("all_gather", axis, size, 1, "backward", False)
        if run.trains and model.vocab:
            yield "head", CommStep("all_gather", axis, size, 1, "forward", False)
            yield "head", CommStep("reduce_scatter", axis, size, 1, "backward", False)
            yield "head", CommStep("all_gather", axis, size, 1, "backward", False)
    if run.trains and model.vocab:
        for step in _loss(plan, tokens, 4 if model.wide_loss else width.activation):
            yield "loss", step
        if outputs_of(plan) == "full":
            whole = run.batch * given * model.vocab * width.activation
            for step in _gathered_logits(plan, tokens * model.vocab * width.activation, whole):
                yield "logits", step
    states = run.batch * run.seq_len * model.hidden * width.activation
    if run.trains and not model.vocab:
        yield from _gathered_states(plan, "last_hidden_state", states)
    if run.trains and model.sequences > 1:
        yield from _gathered_states(plan, "encoder_last_hidden_state", states)
    words, other = root_parameters(plan, model)
    root = parameter_steps(plan, words, other, width, run, root=True, frozen=model.frozen)
    for step in root:
        yield "gradients", step
    for one in apart_of(plan, model):
        for step in parameter_steps(plan, -(-one.words // t), one.other, width, run, root=False):
            again = step.kind == "all_gather" and step.phase == "backward"
            yield "gradients" if one.first and not again else "behind", step


def _loss(plan: ResolvedPlan, tokens: int, element: int) -> Iterator[CommStep]:
    """Vocabulary-parallel cross-entropy in fp32 (maximum, sum and target; one gradient, of
    ``element`` bytes as logits are), the sum over all tokens, and over data ranks their count. A
    sum of narrower numbers is an fp32 one that becomes narrow, and its gradient is summed, too."""
    t, axis, wide = plan.tensor_size, plan.tensor_axis or "tensor", 4
    if t > 1:
        one = 2 * (t - 1) * tokens * wide // t
        yield CommStep("all_reduce", axis, 3 * one, 2, "forward", False)
        yield CommStep("all_reduce", axis, one * element // wide, 1, "backward", False)
    every = tuple(a for a, n in plan.axes.items() if n > 1 and a != plan.tensor_axis)
    for axes in (every, tuple(a for a in every if a in plan.batch_axes)):
        degree = math.prod(plan.axes[a] for a in axes)
        if degree > 1:
            sent = 2 * (degree - 1) * wide // degree
            yield CommStep("all_reduce", "+".join(axes), sent, 1, "forward", False)
    degree = math.prod(plan.axes[a] for a in every)
    if element < wide and degree > 1:
        sent = 2 * (degree - 1) * wide // degree
        yield CommStep("all_reduce", "+".join(every), sent, 1, "backward", False)


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


def _gathered_states(plan: ResolvedPlan, output: str, size: int) -> Iterator[tuple[str, CommStep]]:
    """What a model without a head or an encoder gives, over all axes of the sequence; ``size``: of
    all tokens."""
    mode: Mapping[str, str] = plan.plan.outputs
    axes = tuple(a for a in plan.sequence_axes if plan.axes[a] > 1)
    degree = math.prod(plan.axes[a] for a in axes)
    if degree > 1 and mode.get(output, "full") == "full":
        sent = (degree - 1) * (size // degree)
        yield "states", CommStep("all_gather", "+".join(axes), sent, 1, "forward", False)


def outputs_of(plan: ResolvedPlan) -> str:
    """How logits are returned; loss chunks make none."""
    return "drop" if plan.plan.memory.loss_chunks > 1 else wanted_outputs(plan)


def wanted_outputs(plan: ResolvedPlan) -> str:
    """How the plan says that logits are returned, by the names that models give them."""
    modes: Mapping[str, str] = plan.plan.outputs
    return next((modes[name] for name in ("logits", "output") if name in modes), "full")
