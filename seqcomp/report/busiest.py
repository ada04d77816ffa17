"""Which rank along the ring sends most, where a mask makes ranks send different keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from seqcomp.layout.travel import travel_of
from seqcomp.lowering import ops
from seqcomp.lowering.program import Program
from seqcomp.plan.resolve import ResolvedPlan


def busiest_rank(
    program: Program, values: Mapping[Node, Any], resolved: ResolvedPlan
) -> int | None:
    """Of keys and gradients of keys in all attentions together, the first of several; None where
    all ranks send the same."""
    parts = resolved.ring_size * resolved.ulysses_size
    masks = Counter(
        (node.target.mask, values[node.args[0]].shape[2] * parts)
        for node in program.flat.nodes
        if isinstance(node.target, ops.Attention) and not node.target.whole
    )
    totals = [0] * resolved.ring_size
    for (mask, length), count in masks.items():
        travel = None if mask is None else travel_of(mask, program.layout, length)
        if travel is not None:
            for rank in range(travel.size):
                totals[rank] += count * (sum(travel.sent(rank)) + sum(travel.received(rank)))
    most = max(totals)
    return totals.index(most) if most > min(totals) else None
