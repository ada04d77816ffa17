"""The runtime on real gloo ranks: attention, bytes, groups, orders of ranks, the host side."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from seqcomp.layout.masks import Band
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime import collectives as c
from seqcomp.runtime.dist import group_count, process_context
from seqcomp.runtime.threads import run_ranks
from tests.fixtures.sharded_attention import Case, errors, run_sharded
from tests.harness import run_gloo

TWO = [
    Case({"ring": 2}, layout, transport, causal, kv_heads=kv_heads)
    for layout in ("contiguous", "zigzag", "striped")
    for transport in ("p2p", "allgather")
    for causal, kv_heads in ((True, 2), (False, 4))
] + [Case({"ulysses": 2}, kv_heads=kv_heads, batch=3) for kv_heads in (1, 2, 4)]
FOUR = (
    [
        Case(sizes, layout, transport)
        for sizes in ({"ring": 4}, {"ring": 2, "ulysses": 2}, {"ulysses": 2, "ring": 2})
        for layout in ("contiguous", "zigzag", "striped")
        for transport in ("p2p", "allgather")
    ]
    + [Case({"ulysses": 4}, kv_heads=2, batch=3)]
    + [Case({"ring": 4}, "zigzag", dtype=torch.bfloat16, length=64)]
)


def parity(rank: int, world: int, cases: list[Case]) -> list[tuple[float, tuple[int, int]]]:
    found = []
    for case in cases:
        ctx = process_context(case.sizes)
        worst = max(errors(ctx, case))
        sent = ctx.traffic.bytes(phase="forward"), ctx.traffic.bytes(phase="backward")
        found.append((worst, sent))
        ctx.close()
    return found


@pytest.mark.parametrize(("world", "cases"), [(2, TWO), (4, FOUR)])
def test_attention_and_its_bytes(pools, world, cases):
    for rank in pools.run(world, parity, cases):
        for case, (worst, sent) in zip(cases, rank, strict=True):
            assert worst < (1e-10 if case.dtype == torch.float64 else 0.1), case
            assert sent == case.expected_bytes(), case


WINDOWS = [
    Case({"ring": 4}, layout, transport, rule=Band(0, 6), length=64)
    for layout in ("contiguous", "zigzag", "striped")
    for transport in ("p2p", "allgather")
] + [
    Case({"ulysses": 2, "ring": 2}, rule=Band(-4, 9), length=64),
    Case({"ring": 4}, rule=Band(0, 0)),
]


def test_windows_and_their_bytes(pools):
    """Some ranks send to nobody, some get nothing: nobody waits for them."""

    def sent(ctx, case):
        run_sharded(ctx, case)
        return ctx.traffic.bytes(phase="forward"), ctx.traffic.bytes(phase="backward")

    found = pools.run(4, parity, WINDOWS)
    for index, case in enumerate(WINDOWS):
        threads = run_ranks(lambda ctx, case=case: sent(ctx, case), case.sizes)
        assert [rank[index][1] for rank in found] == threads, case
        assert max(rank[index][0] for rank in found) < 1e-10, case
    assert [rank[-1][1] for rank in found] == [(0, 0)] * 4


def attention_bits(rank: int, world: int, case: Case) -> list[list[float]]:
    ctx = process_context(case.sizes)
    found = [x.flatten().tolist() for x in run_sharded(ctx, case)]
    ctx.close()
    return found


def test_ranks_in_threads_compute_the_same_bits(pools):
    usp = {"ring": 2, "ulysses": 2}
    for transport, rule in itertools.product(("p2p", "allgather"), (None, Band(0, 3))):
        case = Case(usp, "zigzag", transport, dtype=torch.float32, rule=rule)
        threads = run_ranks(lambda ctx, case=case: run_sharded(ctx, case), case.sizes)
        for ours, real in zip(threads, pools.run(4, attention_bits, case), strict=True):
            assert [x.flatten().tolist() for x in ours] == real


def joint_orders(rank: int, world: int) -> None:
    ctx = process_context({"ulysses": 2, "ring": 2})
    ring, ulysses = ctx.coords["ring"], ctx.coords["ulysses"]
    assert rank == ulysses * 2 + ring
    for axes, mine, order in (
        (("ulysses", "ring"), rank, [0, 1, 2, 3]),
        (("ring", "ulysses"), ring * 2 + ulysses, [0, 2, 1, 3]),
    ):
        comm = ctx.comm(axes)
        assert comm.rank == mine
        assert comm.all_gather(torch.tensor(rank)).tolist() == order
        x = torch.arange(4) + 10 * rank
        assert comm.all_to_all(x).tolist() == [10 * r + mine for r in order]
        assert comm.reduce_scatter(x).item() == 60 + 4 * mine
        assert comm.all_reduce(x).tolist() == [60, 64, 68, 72]
        assert comm.all_reduce(x, "max").tolist() == [30, 31, 32, 33]
        to, source = (mine + 1) % 4, (mine - 1) % 4
        sends = [torch.tensor([mine]), torch.tensor([0.5 * mine])]
        got = comm.start_exchange(sends, to=to, source=source).wait()
        assert [x.item() for x in got] == [source, 0.5 * source]
        layout = SequenceLayout("zigzag", 2, 2)
        if axes == ("ring", "ulysses"):
            whole = torch.arange(48).reshape(2, 8, 3)
            local = c.shard(whole, 1, comm, layout)
            assert torch.equal(c.gather(local, 1, comm, layout), whole)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64):
        comm = ctx.comm(("ring",))
        x = torch.full((2, 3), rank + 1).to(dtype)
        assert comm.all_reduce(x).sum().item() == 6 * (4 * ulysses + 3)
        assert comm.reduce_scatter(x).tolist() == [4 * ulysses + 3] * 3
        assert comm.all_gather(x)[1 - ring].sum().item() == 6 * (2 * ulysses + 2 - ring)
        assert comm.all_to_all(x).dtype == dtype
        assert comm.all_gather(x[0, 0]).shape == (2,)
    assert torch.equal(ctx.comm(("ring",)).all_gather(torch.tensor([True])), torch.ones(2, 1) > 0)
    ctx.close()


def test_joint_groups_nest_in_the_order_asked_for(pools):
    pools.run(4, joint_orders)


def groups(rank: int, world: int) -> None:
    before = group_count()
    contexts = []
    for _ in range(3):
        ctx = process_context({"ring": 2, "ulysses": 2})
        ctx.prepare([("ring",), ("ulysses",), ("ring", "ulysses")])
        contexts.append(ctx)
    # The joint group is the whole world, which exists already.
    assert group_count() == before + 2
    case = Case({"ring": 2, "ulysses": 2}, "zigzag")
    for _ in range(5):
        run_sharded(contexts[0], case)
    assert group_count() == before + 2

    # Other axes over the same ranks share the groups, other ranks do not.
    other = process_context({"data": 2, "ring": 2})
    other.prepare([("ring",)])
    assert group_count() == before + 2
    cube = process_context({"data": 1, "ring": 4})
    cube.prepare([("data",), ("ring",), ("data", "ring")])
    assert group_count() == before + 2

    for ctx in contexts:
        ctx.close()
        ctx.close()
    assert group_count() == before + 1
    assert max(errors(other, Case({"data": 2, "ring": 2}, "zigzag"))) < 1e-10
    other.close()
    cube.close()
    assert group_count() == before


def test_groups_are_shared_counted_and_freed():
    # Ranks of their own: groups that earlier tests gave to a DeviceMesh stay for good.
    run_gloo(groups, 4)


def own_mesh(rank: int, world: int) -> None:
    before = group_count()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
    case = Case({"ulysses": 2, "ring": 2}, "striped")
    ctx = process_context(case.sizes, mesh)
    ctx.prepare([("ring",), ("ulysses",)])
    assert group_count() == before
    assert max(errors(ctx, case)) < 1e-10
    ctx.close()
    assert max(errors(process_context(case.sizes, mesh), case)) < 1e-10


def test_a_given_mesh_lends_its_groups(pools):
    pools.run(4, own_mesh)


def host_side(rank: int, world: int) -> None:
    ctx = process_context({"ring": 2, "data": 2})
    assert ctx.host.all_max([rank, -rank, 7]) == [3, 0, 7]
    if rank == 2:
        ctx.store.set("test/who", "two")
    assert ctx.store.get("test/who", timeout_s=30) == "two"
    with pytest.raises(TimeoutError, match="nobody"):
        ctx.store.get("test/nobody", timeout_s=0.1)
    assert ctx.traffic.rows() == []
    ctx.close()


def test_host_channel_and_store(pools):
    pools.run(4, host_side)


def late(rank: int, world: int) -> str:
    ctx = process_context({"ring": 2})
    if rank == 1:
        ctx.store.get("late/done", timeout_s=60)
        return "waited"
    try:
        ctx.host.all_max([1], timeout_s=0.5)
    except RuntimeError as error:
        return type(error).__name__
    finally:
        ctx.store.set("late/done", "yes")
    return "no error"


def world_again(rank: int, world: int) -> None:
    ctx = process_context({"a": 2, "b": 2})
    ctx.prepare([("b",)])
    assert group_count() == 1
    dist.barrier()  # nobody leaves while others still connect
    dist.destroy_process_group()
    assert group_count() == 0
    ctx.close()


def test_a_late_rank_is_an_error_on_the_host_channel():
    first, second = run_gloo(late, 2)
    assert first in {"RuntimeError", "DistBackendError"}
    assert second == "waited"


def test_groups_of_a_destroyed_world_are_forgotten():
    run_gloo(world_again, 4)
