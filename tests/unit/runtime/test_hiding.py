"""Every hop of a ring, the last of the backward too, has tiles that are computed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from seqcomp.layout import halves
from seqcomp.layout.masks import Band, Causal, Full, Mask, TileTask, tiles
from seqcomp.runtime.attention import attention, ring
from seqcomp.runtime.attention.tiling import CPU_CUT
from seqcomp.runtime.comm import Communicator, Pending, RankContext
from seqcomp.runtime.threads import run_ranks
from tests.fixtures.sharded_attention import Case, reference

LAYOUTS = ("contiguous", "zigzag", "striped")


class Recorded(Communicator):
    """Notes when exchanges start and when they are waited for."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.axis, inner.size, inner.rank, inner.traffic)
        self._inner = inner
        self.log: list[Any] = []

    def _start_exchange(
        self, sends: list[Tensor], receives: list[Tensor], to: int, source: int
    ) -> Pending:
        self.log.append("start")
        return _Recorded(self._inner._start_exchange(sends, receives, to, source), self.log)

    def _start_all_gather(self, x: Tensor) -> Pending:
        return self._inner._start_all_gather(x)

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        return self._inner._reduce_scatter(x)

    def _exchange_all(self, sends: list[Tensor], receives: list[Tensor]) -> None:
        self._inner._exchange_all(sends, receives)

    def _start_all_reduce(self, x: Tensor, op: Any) -> Pending:
        raise NotImplementedError

    def _all_to_all(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _Recorded(Pending):
    def __init__(self, inner: Pending, log: list[Any]) -> None:
        self._inner = inner
        self._log = log
        self._number = log.count("start") - 1

    def wait(self) -> list[Tensor]:
        self._log.append(("wait", self._number))
        return self._inner.wait()


def meanwhile(log: list[Any]) -> list[int]:
    """Pairs that are computed while each exchange is under way."""
    starts = [at for at, entry in enumerate(log) if entry == "start"]
    waits = [log.index(("wait", number)) for number in range(len(starts))]
    return [
        sum(entry.area for entry in log[a:b] if isinstance(entry, TileTask))
        for a, b in zip(starts, waits, strict=True)
    ]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the backward go into the log of their ring."""
    tile = ring._add_gradients

    def note(view: ring.Ring, task: TileTask, *rest: Any) -> Any:
        if isinstance(view.comm, Recorded):
            view.comm.log.append(task)
        return tile(view, task, *rest)

    monkeypatch.setattr(ring, "_add_gradients", note)


def backward_of(ctx: RankContext, case: Case) -> tuple[list[Any], float]:
    """What the backward of a rank does, and the largest error of its gradients."""
    q, k, v, dout = (case.local(x, ctx) for x in case.inputs())
    for x in (q, k, v):
        x.requires_grad_()
    comm = Recorded(ctx.comm(("ring",)))
    out = attention(q, k, v, case.plan, ring=comm)
    comm.log.clear()
    found = torch.autograd.grad(out, (q, k, v), dout)
    wanted = (case.local(x, ctx) for x in reference(case)[1:])
    return comm.log, max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("degree", [2, 4])
def test_hops_of_the_backward_have_tiles_behind_them(
    degree: int, layout: str, noted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "SMALLEST_HALF", 4)
    for rule in (Causal(), Full(), Band(0, 11)):
        case = Case({"ring": degree}, layout, rule=rule, length=32 * degree, batch=1)
        for log, wrong in run_ranks(lambda ctx, case=case: backward_of(ctx, case), case.sizes):
            areas = meanwhile(log)
            assert wrong < 1e-10
            # The first keys arrive behind half of the own block, the last gradients behind the
            # other half.
            first, last = areas[0], areas[-1]
            assert min(first, last) >= 0.4 * max(first, last) > 0, case
            if rule == Full() or (rule == Causal() and layout != "contiguous"):
                assert len(areas) == 2 * (degree - 1)
                assert min(areas) > 0, case


def test_control_nothing_is_kept_back(noted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring.Ring, "own", lambda self, phase: halves.Halves(self.tasks(self.rank)))
    case = Case({"ring": 2}, "zigzag", length=64, batch=1)
    for log, wrong in run_ranks(lambda ctx: backward_of(ctx, case), case.sizes):
        assert wrong < 1e-10
        first, last = meanwhile(log)
        assert first > 0
        assert last == 0


@pytest.mark.parametrize("rule", [Causal(), Band(0, 11)], ids=["causal", "window"])
def test_an_all_gather_computes_the_own_block_first(rule: Mask, noted: None) -> None:
    case = Case({"ring": 2}, "zigzag", "allgather", rule=rule, length=64, batch=1)
    for rank, (log, wrong) in enumerate(run_ranks(lambda ctx: backward_of(ctx, case), case.sizes)):
        own = case.plan.layout.ring_ranges(64, rank)
        tasks = list(tiles(rule, own, own, CPU_CUT))
        assert log[: len(tasks)] == tasks
        assert wrong < 1e-10
