"""torch.compile of blocks whose parameters FSDP shards, on real ranks."""

from __future__ import annotations

import pytest

import seqcomp
from tests.fixtures import plans
from tests.fixtures.again import with_memory
from tests.fixtures.biased import biased
from tests.fixtures.models import Spec, build, inputs
from tests.fixtures.parity import data_slice, slice_batch
from tests.fixtures.pool import Pools
from tests.fixtures.traced import Seen, counted, traced

SPEC = Spec(vocab=96)
USP = with_memory(plans.with_fsdp(plans.usp(2, 2)), checkpoint="selective", loss_chunks=2)
HSDP = plans.with_fsdp(plans.with_data(plans.ring(2), 2), "ring")


def on_rank(
    rank: int, world: int, plans_: tuple[plans.Plan, ...]
) -> list[tuple[Seen, int, tuple[str, ...], int]]:
    found = []
    for plan in plans_:
        part, parts = data_slice(plan, rank)
        local = {name: slice_batch(x, part, parts) for name, x in inputs(SPEC).items()}
        # Without an example: which weights are used where is found from a call that is made up.
        model = seqcomp.parallelize(biased() if plan == USP else build(SPEC), plan)
        with counted() as seen:
            steps = traced(model, seqcomp.of(model).context, seen, [local])
        seqcomp.of(model).close()
        found.append((steps, seen.graphs, seen.breaks, seen.waiting()))
    return found


@pytest.mark.distributed
def test_blocks_under_fsdp(pools: Pools) -> None:
    for rank in pools.run(4, on_rank, (USP, HSDP), timeout=280):
        for (seen, graphs, breaks, waiting), kinds in zip(rank, (2, 1), strict=True):
            assert seen.worst <= 1
            assert seen.bytes_alike
            assert graphs == kinds
            assert breaks == ()  # FSDP's hooks run outside of what is compiled
            assert waiting == 0
