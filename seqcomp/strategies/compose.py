"""The strategies of a plan working together on one layer."""

from __future__ import annotations

from seqcomp.layout.travel import Travel
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.strategies.base import AttentionShape, CommStep
from seqcomp.strategies.megatron_sp import MegatronSp
from seqcomp.strategies.ring import Ring
from seqcomp.strategies.ulysses import Ulysses
from seqcomp.strategies.usp import Usp


def layer_steps(
    plan: ResolvedPlan, shape: AttentionShape, module_path: str = ""
) -> tuple[CommStep, ...]:
    """What one rank sends for one layer under a plan; () where no axis splits the sequence.

    With a tensor axis t, ulysses and ring see Hq/t and max(Hkv/t, 1) heads, and the tensor
    axis exchanges the s/(r*u) tokens of its ring and ulysses rank.
    """
    tensor = MegatronSp(plan.tensor_size, plan.tensor_axis or "tensor")
    degree = plan.ring_size * plan.ulysses_size
    return (
        *tensor.comm_steps(shape.on_sequence_rank(degree)),
        *attention_steps(plan, shape, module_path),
    )


def attention_steps(
    plan: ResolvedPlan,
    shape: AttentionShape,
    module_path: str = "",
    travel: Travel | None = None,
    ring_rank: int = 0,
) -> tuple[CommStep, ...]:
    """The part of ``layer_steps`` that happens inside the attention at ``module_path``.

    travel: of its mask, where not all keys travel; then of the ranks that are ``ring_rank`` along
    the ring.
    """
    transport = plan.transport_for(module_path)
    attention = Usp(
        Ring(plan.ring_size, plan.ring_axis or "ring", transport, travel, ring_rank),
        Ulysses(plan.ulysses_size, plan.ulysses_axis or "ulysses"),
    )
    return attention.comm_steps(shape.on_tensor_rank(plan.tensor_size))
