"""What the report says of `memory` is what autograd and the regions hold, to the byte."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import seqcomp
from seqcomp.report.storages import MemoryRow
from seqcomp.runtime import recompute
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.again import loss_of, with_memory, worked
from tests.fixtures.models import Spec, build, inputs
from tests.fixtures.work import Work

SPEC = Spec(vocab=96, heads=8, kv_heads=4, head_dim=8, hidden=64, mlp=128)
LENGTH = 64
PLANS = [plans.usp(2, 2, "zigzag"), plans.with_tensor(plans.ring(2, "zigzag"), 2)]
PLAIN: plans.Plan = {"mesh": {"ring": 1}, "strategies": {"ring": {}}}


class Kept:
    """Storages that regions keep, by rank's thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._by_thread: dict[int, dict[int, Tensor]] = {}
        store = recompute._Region.store

        def counted(region: Any, values: Any) -> None:
            store(region, values)
            own = self._by_thread.setdefault(threading.get_ident(), {})
            for value in region._kept[-1]:
                own[value.untyped_storage().data_ptr()] = value

        monkeypatch.setattr(recompute._Region, "store", counted)

    def sizes(self) -> set[int]:
        """Bytes of each rank; two forwards were run."""
        return {
            sum(x.untyped_storage().nbytes() for x in own.values()) // 2
            for own in self._by_thread.values()
        }


@pytest.mark.parametrize("plan", [*PLANS, PLAIN], ids=plans.name)
def test_rows(plan: plans.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(**memory: Any) -> tuple[Work, tuple[MemoryRow, ...]]:
        work, report = worked(with_memory(plan, **memory), SPEC, batch=1, seq=LENGTH)[0]
        return work, report.memory

    none, no_rows = of()
    assert no_rows == ()
    block, (row,) = of(checkpoint="block")
    assert (row.what, row.where, row.count) == ("checkpoint: block", "layers.*", 2)
    assert none.saved_bytes - block.saved_bytes == row.bytes_without - row.bytes_kept
    ranks = 4 if plan in PLANS else 1
    activation = LENGTH * SPEC.hidden // ranks * 4
    tables = 2 * LENGTH // ranks * max(1, ranks // 2) * SPEC.head_dim * 4
    assert row.bytes_kept <= 2 * activation + tables
    assert row.bytes_without > 12 * row.bytes_kept

    kept = Kept(monkeypatch)
    both, (dear, chunks) = of(checkpoint="selective", loss_chunks=4)
    saved = none.saved_bytes - both.saved_bytes
    inputs_alone = row.bytes_kept
    assert kept.sizes() == {dear.bytes_kept - inputs_alone}
    assert dear.bytes_without == row.bytes_without
    changed = sum(r.bytes_without - r.bytes_kept for r in (dear, chunks))
    assert saved == changed + dear.bytes_kept - inputs_alone
    assert chunks.bytes_without - chunks.bytes_kept >= 0.9 * LENGTH // ranks * SPEC.vocab * 4
    assert both.flops["attention"] == none.flops["attention"]
    assert block.flops["attention"] == 2 * none.flops["attention"]


def test_offload_says_where() -> None:
    """On the CPU nothing moves, and the row says so."""
    plan = with_memory(PLANS[0], checkpoint="block", offload="cpu")
    report = worked(plan, SPEC, batch=1, seq=LENGTH)[0][1]
    assert [row.on_host for row in report.memory] == [False]
    assert [row["on_host"] for row in report.to_json()["memory"]] == [False]
    assert "checkpoint: block in layers.* (2 calls)" in str(report)


@pytest.mark.parametrize("memory", [{}, {"checkpoint": "selective", "loss_chunks": 2}], ids=str)
def test_nothing_is_left_of_a_report(memory: dict[str, Any]) -> None:
    """What it imagined goes with it."""

    def step(model: Any, context: Any, local: dict[str, Any]) -> list[int]:
        loss_of(model, local)
        left = []
        for _ in range(3):
            seqcomp.of(model).report()
            gc.collect()
            left.append(sum(isinstance(x, FakeTensor) for x in gc.get_objects()))
        return left

    spec = Spec(vocab=96, layers=1)
    plan = with_memory(PLAIN, **memory)
    (left,) = lockstep(lambda: build(spec), plan, step, inputs=inputs(spec))
    assert left[1] == left[2]
