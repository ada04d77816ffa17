"""FLOPs of one step under three conventions, and how well they use a cluster."""

from __future__ import annotations

import math

from seqcomp.cost.run import Run
from seqcomp.cost.shape import Block, ModelShape
from seqcomp.cost.source import source_tokens
from seqcomp.cost.unfused import attends_again
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
    blocks = sum(b.count * _products(b, run.seq_len) for b in model.blocks) * sequences
    head_tokens = tokens if run.trains else sequences
    dense = blocks + 2 * head_tokens * model.hidden * model.vocab
    full = seen = written = 0.0
    for block in model.blocks:
        length = block.source or run.seq_len
        shape = block.attention(sequences, length, 1, model.hidden)
        each = 2 * sequences * (shape.width + shape.value_width) * block.count
        keys = length * source_tokens(block, run) if block.cross else 0
        full += each * (length**2 + keys)
        rule = block.rule if block.source else run.mask(block.rule)
        own = each * (whole_area(rule, length) + keys)
        seen += own
        written += own if attends_again(plan, block, run) else 0.0
    if not run.trains:
        return {"full": dense + full, "causal": dense + seen, "hw": dense + seen}
    again = {"none": 0.0, "selective": blocks + written, "block": blocks + seen}
    return {
        "full": 3 * (dense + full),
        "causal": 3 * (dense + seen),
        "hw": 3 * dense + 3.5 * seen + again[plan.plan.memory.checkpoint],
    }


def _products(block: Block, length: int) -> float:
    """FLOPs of one block's matrices for one sequence, forward."""
    if block.cross is None or not block.cross.source:
        return 2 * (block.source or length) * block.active_parameters
    own = block.active_parameters - block.cross.kv
    return 2 * (length * own + block.cross.source * block.cross.kv)
