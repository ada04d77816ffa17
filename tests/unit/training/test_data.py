"""Which rank gets which samples, going on where a job stopped, and packed rows."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import seqcomp
from seqcomp.training.data import IGNORED, BatchSampler, Slice, pack, slice_of_rank, stack
from tests.fixtures import plans

SAMPLES, BATCH = 22, 4


def taken(part: Slice, epoch: int = 0, seed: int = 0) -> list[list[int]]:
    sampler = BatchSampler(SAMPLES, BATCH, part, seed=seed)
    sampler.epoch = epoch
    return list(sampler)


def test_slices_make_up_the_batch_and_an_epoch_has_each_sample_once() -> None:
    whole = taken(Slice())
    first, second = taken(Slice(0, 2)), taken(Slice(1, 2))
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
    assert len(whole) == len(BatchSampler(SAMPLES, BATCH, Slice())) == SAMPLES // BATCH
    seen = [i for batch in whole for i in batch]
    assert len(set(seen)) == len(seen) == 20
    assert taken(Slice()) == whole
    assert taken(Slice(), epoch=1) != whole
    assert taken(Slice(), seed=1) != whole
    plain = BatchSampler(SAMPLES, BATCH, Slice(1, 2), shuffle=False)
    assert list(plain)[:2] == [[2, 3], [6, 7]]


def test_ranks_of_a_sequence_group_have_one_slice() -> None:
    plan = seqcomp.load_plan(plans.with_tensor(plans.with_data(plans.ring(2), 2), 2))
    assert list(plan.mesh) == ["data", "ring", "tensor"]
    assert [slice_of_rank(plan, r) for r in range(8)] == [Slice(0, 2)] * 4 + [Slice(1, 2)] * 4
    inner = {**plan.to_dict(), "mesh": {"ring": 2, "data": 2, "tensor": 1}}
    plan = seqcomp.load_plan(inner)
    assert [slice_of_rank(plan, r).index for r in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_job_goes_on_where_another_stopped(workers: int) -> None:
    """Also with other slices, and while a worker has fetched more than was used."""

    def batches(sampler: BatchSampler, number: int) -> list[list[int]]:
        loader: DataLoader[int] = DataLoader(
            range(SAMPLES),  # type: ignore[arg-type]
            batch_sampler=sampler,
            num_workers=workers,
        )
        feed = sampler.feed(loader)
        return [next(feed).tolist() for _ in range(number)]

    want = batches(BatchSampler(SAMPLES, BATCH, Slice()), 8)
    stopped = BatchSampler(SAMPLES, BATCH, Slice())
    assert batches(stopped, 3) == want[:3]
    for part in (Slice(), Slice(1, 2)):
        again = BatchSampler(SAMPLES, BATCH, part)
        again.load_state_dict(stopped.state_dict())
        size = BATCH // part.count
        own = slice(part.index * size, (part.index + 1) * size)
        assert batches(again, 5) == [batch[own] for batch in want[3:]]
        assert again.epoch == 1
    assert len(stopped) == 2


def test_mistakes_are_said() -> None:
    with pytest.raises(ValueError, match="cannot be cut into 3"):
        BatchSampler(SAMPLES, BATCH, Slice(0, 3))
    with pytest.raises(ValueError, match="do not fill"):
        BatchSampler(3, BATCH, Slice())
    sampler = BatchSampler(SAMPLES, BATCH, Slice())
    next(iter(sampler))
    with pytest.raises(RuntimeError, match=r"sampler\.feed"):
        sampler.state_dict()
    with pytest.raises(ValueError, match="seed 1"):
        BatchSampler(SAMPLES, BATCH, Slice()).load_state_dict(
            {"seed": 1, "epoch": 0, "position": 0}
        )


def test_packed_rows_hold_every_token_once_and_no_label_across_a_border() -> None:
    lengths = [5, 11, 1, 7, 16, 2]
    documents = [torch.arange(n) + 100 * (i + 1) for i, n in enumerate(lengths)]
    rows = list(pack(documents, 8, filler=7))
    assert torch.equal(torch.cat([r.input_ids for r in rows])[: sum(lengths)], torch.cat(documents))
    assert rows[0].position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert rows[0].labels.tolist() == [IGNORED, 101, 102, 103, 104, IGNORED, 201, 202]
    assert rows[1].position_ids.tolist() == list(range(8))  # goes on, as a document of its own
    assert rows[2].position_ids.tolist() == [0, 0, 1, 2, 3, 4, 5, 6]
    last = rows[-1]
    assert last.input_ids.tolist() == [600, 601] + [7] * 6
    assert last.labels.tolist() == [IGNORED, 601] + [IGNORED] * 6
    assert last.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    for row in rows:
        kept = row.labels != IGNORED
        assert torch.equal(row.labels[kept], row.input_ids[kept])
        # What a shifted label is predicted from is of the same document.
        before = row.input_ids.roll(1)
        assert bool((row.input_ids[kept] // 100 == before[kept] // 100).all())
    assert stack(rows[:2])["labels"].shape == (2, 8)
