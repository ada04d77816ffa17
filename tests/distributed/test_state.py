"""Checkpoints: saved under one plan and loaded under another, and what a failed save leaves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

import seqcomp
from seqcomp.training.export import export_safetensors, load_full, save_full
from seqcomp.training.job import Job
from seqcomp.training.state import CheckpointError, Checkpoints, about_of
from tests.fixtures import plans
from tests.fixtures.jobs import (
    assert_close,
    digest,
    forget,
    make_job,
    make_model,
    outcome,
    resume,
    train,
)
from tests.fixtures.pool import Pools

PLANS = {
    "ring": plans.ring(4, "zigzag"),
    "megatron": plans.with_tensor(plans.ring(2, "zigzag"), 2),
    "sharded": plans.with_fsdp(plans.usp(2, 2, "zigzag")),
    "both": plans.with_fsdp(plans.with_tensor(plans.ring(2, "zigzag"), 2)),
}
SAVED, END = 10, 20


class FullDisk(FileSystemWriter):
    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")


class FullOnRankOne(Checkpoints):
    def _writer(self, path: Path) -> FileSystemWriter:
        return FullDisk(path) if self._rank == 1 else super()._writer(path)


def uninterrupted(folder: Path, plan: Any, *, background: bool) -> tuple[Any, dict[str, Any]]:
    """A job that saves on its way; its model, and how it ends."""
    model = make_model(plan)
    job, checkpoints = make_job(model), Checkpoints(folder)

    def save(step: int) -> None:
        if step == SAVED:
            checkpoints.save(job, step, background=background)

    train(job, 0, END, save)
    checkpoints.close()
    return model, outcome(job)


def on_ranks(rank: int, world: int, folder: Path) -> dict[str, str]:
    """Every pair of plans; the digests of the uninterrupted runs."""
    want = torch.load(folder / "end.pt")
    models, ends = {}, {}
    for name, plan in PLANS.items():
        background = name == "ring"  # the copy must not follow the training that goes on
        models[name], ends[name] = uninterrupted(folder / name, plan, background=background)
        assert_close(want, ends[name])
    uneven = models["megatron"].emb.weight
    assert isinstance(uneven, DTensor)
    assert uneven.to_local().shape[0] == (49, 48)[rank % 2]
    about = about_of(folder / "megatron" / "step-00000010")
    assert about["tensors"]["model.emb.weight"] == ["torch.float64", [97, 32]]
    assert about["tensors"]["optimizer.state.emb.weight.exp_avg"] == ["torch.float64", [97, 32]]
    assert "model.head.weight" not in about["tensors"], "tied weights are saved twice"

    for name, model in models.items():
        for source in ("one", *PLANS):
            job = forget(model)
            assert resume(folder / source, job) == SAVED
            train(job, SAVED, END)
            end = outcome(job)
            assert_close(want, end)
            if source == name:
                assert digest(end) == digest(ends[name]), "not the same to the bit"

    job = forget(models["megatron"])
    resume(folder / "megatron", job)
    failures(rank, job, folder / "failing")
    for name in ("megatron", "both"):
        job = forget(models[name])
        resume(folder / name, job)
        (folder / f"whole-{name}").mkdir(exist_ok=True)
        whole_files(job, folder / f"whole-{name}")
    for model in models.values():
        seqcomp.of(model).close()
    return {name: digest(end) for name, end in ends.items()}


def save_and_wait(checkpoints: Checkpoints, job: Job, *, background: bool) -> None:
    checkpoints.save(job, 2, background=background)
    checkpoints.wait()


def failures(rank: int, job: Job, folder: Path) -> None:
    """A disk that fills up on one rank: the same error on all, and what was there stays."""
    torch.manual_seed(rank)
    random.seed(rank)
    good = Checkpoints(folder, keep=1)
    assert good.latest() is None
    good.save(job, 1)
    drawn = torch.rand(3).tolist(), random.random()
    for background in (False, True):
        full = FullOnRankOne(folder)
        with pytest.raises(CheckpointError) as caught:
            save_and_wait(full, job, background=background)
        assert "rank 1: OSError(28, 'No space left on device')" in str(caught.value)
        assert "rank 2" not in str(caught.value)
        full.close()
        dist.barrier()  # rank 0 clears up
        assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert good.resume(job) == 1
    assert (torch.rand(3).tolist(), random.random()) == drawn, "random states are not those of then"
    good.save(job, 2)
    good.save(job, 2)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    good.close()


def whole_files(job: Job, folder: Path) -> None:
    """One file with everything, one with the weights; the first loads back into parts."""
    names = export_safetensors(job.model, folder / "model.safetensors")
    assert "head.weight" not in names
    save_full(job, folder / "full.pt", SAVED)
    before = outcome(job)
    # Every rank has the error of the one that writes, and none waits in a gather.
    for fail in (
        lambda path: export_safetensors(job.model, path),
        lambda path: save_full(job, path, SAVED),
    ):
        with pytest.raises(CheckpointError, match="weights failed: rank 0: FileNotFoundError"):
            fail(folder / "nowhere" / "weights")
    again = forget(job.model)
    assert load_full(again, folder / "full.pt") == SAVED
    assert digest(outcome(again)) == digest(before)


@pytest.mark.distributed
def test_save_under_one_plan_and_load_under_another(pools: Pools, tmp_path: Path) -> None:
    _, end = uninterrupted(tmp_path / "one", None, background=True)
    torch.save(end, tmp_path / "end.pt")
    digests = pools.run(4, on_ranks, tmp_path)
    assert digests == [digests[0]] * 4

    for source in PLANS:
        job = forget(make_model(None))
        assert resume(tmp_path / source, job) == SAVED
        train(job, SAVED, END)
        assert_close(end, outcome(job))

    for source in ("megatron", "both"):
        job = make_job(make_model(None))
        assert resume(tmp_path / source, job) == SAVED
        exported = load_file(tmp_path / f"whole-{source}" / "model.safetensors")
        saved = torch.load(tmp_path / f"whole-{source}" / "full.pt", weights_only=True)
        assert list(saved["model"]) == list(job.model.state_dict())
        for name, x in job.model.state_dict().items():
            assert torch.equal(saved["model"][name], x), name
            if name != "head.weight":
                assert torch.equal(exported.pop(name), x), name
        assert not exported


def test_a_save_in_one_process_that_fails_leaves_the_last(tmp_path: Path) -> None:
    class Full(Checkpoints):
        def _writer(self, path: Path) -> FileSystemWriter:
            return FullDisk(path)

    job = make_job(make_model(None))
    Checkpoints(tmp_path).save(job, 1)
    (tmp_path / "step-00000009.partial").mkdir()
    with pytest.raises(CheckpointError, match=r"save of step 2 failed: .*No space left"):
        Full(tmp_path).save(job, 2)
    assert Checkpoints(tmp_path).latest() == tmp_path / "step-00000001"
