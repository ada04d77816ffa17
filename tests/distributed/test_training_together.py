"""Twenty steps of everything at once: sharding, checkpoints, dropout, accumulation, clipping."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.verify.same_dropout import same_dropout
from tests.fixtures import plans
from tests.fixtures.again import with_memory
from tests.fixtures.compare import whole
from tests.fixtures.dropping import SEED, batch, build, seeds
from tests.fixtures.parity import data_slice, slice_batch
from tests.fixtures.pool import Pools

STEPS, MICRO = 20, 3
CLIP = 1.0
USP = plans.usp(2, 2, "zigzag")
HYBRID = plans.with_data(plans.ring(2, "zigzag"), 2)
MEGATRON = plans.with_tensor(plans.ring(2, "zigzag"), 2)
PLANS = [
    with_memory(plans.with_fsdp(USP), checkpoint="selective", loss_chunks=2),
    with_memory(plans.with_fsdp(HYBRID, "ring"), checkpoint="block"),
    with_memory(MEGATRON, checkpoint="block"),
    with_memory(plans.with_fsdp(MEGATRON), checkpoint="selective", loss_chunks=2),
]


def alone() -> tuple[dict[str, Tensor], list[float]]:
    """Weights after all steps on one process, and the norms before clipping."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    drawn = iter(seeds(STEPS * MICRO))
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            with same_dropout(next(drawn)):
                model(**batch(MICRO * step + micro))["loss"].backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def on_rank(
    rank: int, world: int, plan: plans.Plan, want: dict[str, Tensor], norms: list[float]
) -> None:
    model = seqcomp.parallelize(build(), plan=plan, example_inputs=batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    part, parts = data_slice(plan, rank)
    torch.manual_seed(SEED + rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            ids = slice_batch(batch(MICRO * step + micro)["input_ids"], part, parts)
            model(input_ids=ids)["loss"].backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert float(whole(norm)) == pytest.approx(norms[step], rel=1e-8)
        optimizer.step()
    for name, parameter in model.named_parameters():
        got = whole(parameter.detach())
        torch.testing.assert_close(got, want[name], rtol=1e-8, atol=1e-8, msg=name)
    seqcomp.of(model).close()


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_final_weights_are_those_of_one_process(pools: Pools, plan: plans.Plan) -> None:
    want, norms = alone()
    assert sum(norm > CLIP for norm in norms) > STEPS / 2, "hardly anything is clipped"
    pools.run(math.prod(plan["mesh"].values()), on_rank, plan, want, norms)
