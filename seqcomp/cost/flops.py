"""FLOPs of one step under three conventions, and how well they use a cluster."""

from __future__ import annotations

import math

from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.layout.intervals import whole_area
from seqcomp.plan.resolve import ResolvedPlan

CONVENTIONS = {
    "full": "6 x parameters x tokens, and attention over all pairs, masked or not; backward 2 x",
    "causal": "as full, with the pairs that the mask lets through",
    "hw": "what is computed: visible pairs, attention's backward 2.5 x, checkpoints' second run",
}


def tokens_of(plan: ResolvedPlan, run: Run) -> int:
    """Of the global batch."""
    return run.batch * run.seq_len * math.prod(plan.axes[axis] for axis in plan.batch_axes)


def flops_of(plan: ResolvedPlan, model: ModelShape, run: Run) -> dict[str, float]:
    """By convention, of all ranks together; a prefill is a forward with one row of logits."""
    tokens, sequences = tokens_of(plan, run), tokens_of(plan, run) // run.seq_len
    blocks = 2 * tokens * sum(b.count * b.active_parameters for b in model.blocks)
    head_tokens = tokens if run.trains else sequences
    dense = blocks + 2 * head_tokens * model.hidden * model.vocab
    full = seen = 0.0
    for block in model.blocks:
        shape = block.attention(sequences, run.seq_len, 1, model.hidden)
        each = 2 * sequences * (shape.width + shape.value_width) * block.count
        full += each * run.seq_len**2
        seen += each * whole_area(run.mask(block.rule), run.seq_len)
    if not run.trains:
        return {"full": dense + full, "causal": dense + seen, "hw": dense + seen}
    again = {"none": 0.0, "selective": blocks, "block": blocks + seen}
    return {
        "full": 3 * (dense + full),
        "causal": 3 * (dense + seen),
        "hw": 3 * dense + 3.5 * seen + again[plan.plan.memory.checkpoint],
    }
