"""Which parameters Megatron-SP leaves whole on every rank, read off a capture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from seqcomp.capture.edit import op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.recognise import AttentionInfo
from seqcomp.placement.megatron import TensorPlan, plan_tensor_axis


def whole_parameters(capture: Capture, infos: Sequence[AttentionInfo]) -> frozenset[str]:
    """Names of the parameters that no degree cuts: fused and unpaired weights, norms.

    Keys and values beyond the KV heads are not among them. The capture is used up. Empty where the
    heads of the attentions have no common divisor, which no degree divides.
    """
    ways = math.gcd(*(info.heads for info in infos))
    degree = next((n for n in range(2, ways + 1) if ways % n == 0), 1)
    if degree == 1:
        return frozenset()
    plan = plan_tensor_axis(capture, "tensor", degree)
    cut = {node.name for node in plan.specs} | set(_gathered(plan))
    named = capture.state
    return frozenset(named[name] for name in capture.parameters if name not in cut)


def _gathered(plan: TensorPlan) -> Iterator[str]:
    """Weights and biases of linears that make keys and values for all ranks."""
    for linear, role in plan.roles.items():
        if role == "gathered":
            for operand in linear.all_input_nodes:
                source = operand
                while op_name(source) == "aten.t":
                    source = source.all_input_nodes[0]
                yield source.name
