"""Checkpointed blocks and a chunked loss on real ranks: same gradients, counted traffic."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import seqcomp
from tests.fixtures import plans
from tests.fixtures.again import loss_of, with_memory
from tests.fixtures.compare import FP64, compare_grads, gradients_of, reference
from tests.fixtures.lockstep import counted, reported
from tests.fixtures.models import Spec, build, inputs
from tests.fixtures.pool import Pools

SPEC = Spec(vocab=96)
PLANS = [
    with_memory(plans.ring(2, "zigzag"), checkpoint="block", loss_chunks=2),
    with_memory(plans.ulysses(2), checkpoint="selective", loss_chunks=2),
    with_memory(plans.megatron(2), checkpoint="selective", loss_chunks=3),
]


def on_rank(
    rank: int, world: int, cases: list[plans.Plan], want: dict[str, Tensor | None]
) -> list[tuple[float, bool]]:
    """Two micro-batches forward before their backwards, then a step that is counted."""
    found = []
    batch: dict[str, Any] = inputs(SPEC)
    for plan in cases:
        model = seqcomp.parallelize(build(SPEC), plan=plan, example_inputs=batch)
        first, second = loss_of(model, batch), loss_of(model, batch)
        second.backward()
        first.backward()
        model.zero_grad()
        compiled = seqcomp.of(model)
        compiled.context.traffic.reset()
        loss_of(model, batch).backward()
        same = reported(compiled.report()) == counted(compiled.context)
        found.append((compare_grads(want, gradients_of(model), FP64)[0], same))
        compiled.close()
    return found


@pytest.mark.distributed
def test_on_two_real_ranks(pools: Pools) -> None:
    want = reference(lambda: build(SPEC), inputs(SPEC)).gradients
    for rank in pools.run(2, on_rank, PLANS, want):
        assert all(distance <= 1 and same for distance, same in rank), rank
