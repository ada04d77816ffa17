"""The pool of ranks: answers in order, failures shown, hangs ended, and it recovers."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

from tests.fixtures.pool import Pools, RankError

pytestmark = pytest.mark.distributed


def total(rank: int, world: int, start: int) -> float:
    value = torch.tensor([float(start + rank)])
    torch.distributed.all_reduce(value)
    return value.item()


def misbehave(rank: int, world: int, how: str) -> int:
    if rank == 1 and how == "raise":
        raise ValueError("rank one has a problem")
    if rank == 1 and how == "die":
        ctypes.string_at(0)
    if rank == 1 and how == "hang":
        time.sleep(60)
    return rank


def test_answers_failures_and_recovery(capfd: pytest.CaptureFixture[str]) -> None:
    pools = Pools()
    try:
        assert pools.run(2, total, 10) == [21.0, 21.0]
        assert pools.run(2, misbehave, "no") == [0, 1]
        with pytest.raises(RankError, match=r"(?s)rank 1: .*rank one has a problem") as caught:
            pools.run(2, misbehave, "raise")
        assert "rank 0:" not in str(caught.value)
        with pytest.raises(RankError, match=r"ranks \[1\] gave no answer in 4 s"):
            pools.run(2, misbehave, "hang", timeout=4)
        with pytest.raises(RankError, match="rank 1: the process died: SIGSEGV"):
            pools.run(2, misbehave, "die")
        stacks = capfd.readouterr().err
        assert "in misbehave" in stacks
        assert "ffi_call" in stacks
        assert pools.run(2, total, 0) == [1.0, 1.0]
    finally:
        pools.close()
