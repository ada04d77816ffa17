"""Checkpoints of jobs whose parameters FSDP shards: loaded under other plans, and by files."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn
from torch.distributed.tensor import DTensor

import seqcomp
from seqcomp.training.export import load_full, save_full
from seqcomp.training.job import Job
from seqcomp.training.state import Checkpoints
from tests.fixtures import plans
from tests.fixtures.jobs import assert_close, forget, make_job, make_model, outcome, resume, train
from tests.fixtures.pool import Pools

RING = plans.ring(2)
SHARDED = {
    "ring": plans.with_fsdp(RING),
    "ulysses": plans.with_fsdp(plans.ulysses(2), reshard=False),
}
PAIRS = [("ring", "plain"), ("plain", "ring"), ("ring", "ulysses")]
SAVED, END = 2, 4


def on_ranks(rank: int, world: int, folder: Path) -> None:
    models: dict[str, nn.Module] = {}
    ends = {}
    for name, plan in {"plain": RING, **SHARDED}.items():
        models[name] = make_model(plan)
        job, checkpoints = make_job(models[name]), Checkpoints(folder / name)

        def save(
            step: int, job: Job = job, to: Checkpoints = checkpoints, late: bool = name == "ring"
        ) -> None:
            if step == SAVED:
                to.save(job, step, background=late)

        train(job, 0, END, save)
        checkpoints.close()
        ends[name] = outcome(job)
        assert_close(ends["plain"], ends[name])
    held = models["ring"].emb.weight
    assert isinstance(held, DTensor)
    assert held.to_local().shape[0] == (49, 48)[rank]
    for source, target in PAIRS:
        job = forget(models[target])
        assert resume(folder / source, job) == SAVED
        train(job, SAVED, END)
        assert_close(ends["plain"], outcome(job))
    save_full(job, folder / "full.pt", END)
    again = forget(models["ring"])
    assert load_full(again, folder / "full.pt") == END
    assert_close(ends["plain"], outcome(again))
    for model in models.values():
        seqcomp.of(model).close()


@pytest.mark.distributed
def test_what_is_sharded_is_saved_whole(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, on_ranks, tmp_path)
