"""FSDP2 where a mesh has nothing else, and over a block that is used for every layer; fused and
foreach AdamW on the shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import seqcomp
from seqcomp.runtime import chunked_mlp
from tests.fixtures import plans
from tests.fixtures.again import with_memory
from tests.fixtures.compare import whole
from tests.fixtures.models import M0, Spec, build, inputs
from tests.fixtures.parity import slice_batch
from tests.fixtures.pool import Pools

TIED = Spec(vocab=96, tied=True, bias=True)


def stepped(alone: nn.Module, model: nn.Module, local: Any, batch: Any, **adam: Any) -> None:
    """Two steps of both; their weights are the same."""
    optimizers = [
        torch.optim.AdamW(part.parameters(), lr=1e-2, eps=1e-3, **adam) for part in (alone, model)
    ]
    for _ in range(2):
        alone(**batch)["loss"].backward()
        model(**local)["loss"].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=1e-8, atol=1e-9, msg=name)


def on_rank(rank: int, world: int) -> None:
    batch = inputs(TIED, batch=4)
    local = {name: slice_batch(x, rank, world) for name, x in batch.items()}
    plan = {"mesh": {"shard": 2}, "strategies": {"fsdp": {"axes": ["shard"]}}}
    model = seqcomp.parallelize(build(TIED), plan, example_inputs=local)
    stepped(build(TIED), model, local, batch, fused=True)
    seqcomp.of(model).close()

    models = []
    for _ in range(2):
        models.append(build(M0))
        models[-1].layers[1] = models[-1].layers[0]  # type: ignore[index]
    plan = with_memory(plans.with_fsdp(plans.ring(2, "zigzag")), checkpoint="selective")
    seqcomp.parallelize(models[1], plan, example_inputs=inputs(M0))
    fewest, chunked_mlp.FEWEST = chunked_mlp.FEWEST, 2
    try:
        stepped(models[0], models[1], inputs(M0), inputs(M0), foreach=True)
    finally:
        chunked_mlp.FEWEST = fewest
    seqcomp.of(models[1]).close()


@pytest.mark.distributed
def test_weights_are_those_of_one_process(pools: Pools) -> None:
    pools.run(2, on_rank)
