"""Ranks in threads: order of ranks, failures, deadlines, determinism, the host side."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from seqcomp.runtime.threads import RankAbortedError, run_ranks


def test_groups_nest_in_the_order_they_are_asked_for():
    def fn(ctx):
        found = []
        for axes in (("a", "b"), ("b", "a"), ("c",), ("c", "a"), ("a", "b", "c")):
            comm = ctx.comm(axes)
            ranks = comm.all_gather(torch.tensor(ctx.rank)).tolist()
            assert ranks[comm.rank] == ctx.rank
            assert comm.axis == "+".join(axes)
            found.append(ranks)
        assert ctx.comm(("a", "b")) is ctx.comm(("a", "b"))
        return found

    first = run_ranks(fn, {"a": 2, "b": 3, "c": 2})[0]
    assert first == [
        [0, 2, 4, 6, 8, 10],
        [0, 6, 2, 8, 4, 10],
        [0, 1],
        [0, 6, 1, 7],
        list(range(12)),
    ]


def test_sixty_four_ranks_exchange_and_reduce():
    def fn(ctx):
        comm = ctx.comm(("x",))
        value = torch.tensor([float(ctx.rank)])
        for _ in range(5):
            to, source = (ctx.rank + 1) % 64, (ctx.rank - 1) % 64
            (value,) = comm.start_exchange([value], to=to, source=source).wait()
        assert value.item() == (ctx.rank - 5) % 64
        return comm.all_reduce(value).item()

    assert set(run_ranks(fn, {"x": 64})) == {64 * 63 / 2}


def test_reductions_are_bitwise_reproducible_and_agree():
    def fn(ctx):
        comm = ctx.comm(("x",))
        x = torch.randn(8, 50, generator=torch.Generator().manual_seed(ctx.rank)) * 1e3
        whole = comm.all_reduce(x)
        return whole, torch.equal(comm.reduce_scatter(x), whole[comm.rank])

    first, second = run_ranks(fn, {"x": 8}), run_ranks(fn, {"x": 8})
    assert all(equal for _, equal in first)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True))
    assert all(torch.equal(a, first[0][0]) for a, _ in first)


def test_what_was_sent_may_be_overwritten_after_the_call():
    def fn(ctx):
        comm = ctx.comm(("x",))
        x = torch.full((3, 1), float(ctx.rank))
        row = comm.all_to_all(x)
        x.fill_(-1.0)
        return row.flatten().tolist()

    assert run_ranks(fn, {"x": 3}) == [[0.0, 1.0, 2.0]] * 3


def test_a_failing_rank_releases_the_others_and_its_error_is_raised():
    released = []

    def fn(ctx):
        if ctx.rank == 2:
            raise ValueError("rank two is broken")
        try:
            ctx.comm(("x",)).all_reduce(torch.ones(1))
        except RankAbortedError:
            released.append(ctx.rank)
            raise

    start = time.monotonic()
    with pytest.raises(ValueError, match="rank two is broken"):
        run_ranks(fn, {"x": 4})
    assert time.monotonic() - start < 30
    assert sorted(released) == [0, 1, 3]
    assert not [t for t in threading.enumerate() if t.name.startswith("rank")]


def test_ranks_that_call_different_collectives_are_told_so():
    def fn(ctx):
        comm = ctx.comm(("x",))
        return comm.all_gather(torch.ones(2)) if ctx.rank else comm.all_reduce(torch.ones(3))

    with pytest.raises(RuntimeError, match=r"all_gather of \[2\].*; all_reduce sum of \[3\]"):
        run_ranks(fn, {"x": 2})


def test_a_rank_that_never_comes_ends_in_a_timeout():
    def fn(ctx):
        if ctx.rank:
            ctx.comm(("x",)).all_gather(torch.ones(2))

    with pytest.raises(TimeoutError, match=r"all_gather of \[2\] torch.float32 over x within 0.2"):
        run_ranks(fn, {"x": 2}, timeout=0.2)


def test_host_channel_and_store():
    def fn(ctx):
        if ctx.rank == 1:
            ctx.store.set("who", "one")
        assert ctx.store.get("who") == "one"
        with pytest.raises(TimeoutError):
            ctx.store.get("nobody", timeout_s=0.05)
        assert ctx.traffic.rows() == []
        return ctx.host.all_max([ctx.rank, -ctx.rank])

    assert run_ranks(fn, {"x": 3}) == [[2, 0]] * 3


def test_gradients_and_modes_belong_to_the_rank():
    def fn(ctx):
        if ctx.rank == 0:
            with torch.no_grad():
                ctx.host.all_max([0])
        else:
            assert torch.is_grad_enabled()
            ctx.host.all_max([0])
        x = torch.ones(1, requires_grad=True)
        seen = []
        x.register_hook(lambda g: seen.append(threading.current_thread().name))
        (x * 2).sum().backward()
        return seen

    assert run_ranks(fn, {"x": 2}) == [["rank0"], ["rank1"]]


@pytest.mark.parametrize(("cores", "turns"), [(1, 1), (2, 1), (4, 2)])
def test_ranks_take_turns(cores: int, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of them get to every meeting."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    inside: set[int] = set()
    most: list[int] = []

    def fn(ctx):
        for _ in range(5):
            inside.add(ctx.rank)
            time.sleep(0.001)  # lets others run, where they may
            most.append(len(inside))
            inside.discard(ctx.rank)
            ctx.comm(("x",)).all_gather(torch.zeros(1))
            time.sleep(0.001)

    run_ranks(fn, {"x": 6})
    assert len(most) == 6 * 5
    assert max(most) <= turns
