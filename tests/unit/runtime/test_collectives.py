"""Collectives and their gradients on ranks in threads; exact integers wherever possible."""

from __future__ import annotations

import pytest
import torch

from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime import collectives as c
from seqcomp.runtime.threads import run_ranks

LAYOUTS = [
    SequenceLayout("contiguous", 2, 2),
    SequenceLayout("zigzag", 2, 2),
    SequenceLayout("striped", 2, 2),
    SequenceLayout("zigzag", 4, 1),
    None,
]
SIZES = {"ring": 2, "ulysses": 2}
AXES = ("ring", "ulysses")


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=dtype).reshape(shape)


def owned(layout: SequenceLayout | None, length: int, rank: int) -> torch.Tensor:
    return torch.tensor((layout or SequenceLayout("contiguous", 4)).token_index(length, rank))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shard_and_gather_are_inverse_and_take_the_tokens_of_the_layout(layout, dim):
    def fn(ctx):
        comm = ctx.comm(AXES)
        for dtype in (torch.float64, torch.int64, torch.bool, torch.bfloat16):
            x = (numbers(8, 16, 24, dtype=torch.int64) % 7).to(dtype).transpose(0, 1)
            local = c.shard(x, dim, comm, layout)
            index = owned(layout, x.shape[dim], ctx.rank)
            assert torch.equal(local, x.index_select(dim, index))
            assert torch.equal(c.gather(local, dim, comm, layout), x)
            assert local.data_ptr() != x.data_ptr()

    run_ranks(fn, SIZES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_shard_enter_and_gather(layout):
    def fn(ctx):
        comm = ctx.comm(AXES)
        index = owned(layout, 16, ctx.rank)
        x = numbers(3, 16, 2).requires_grad_()
        weight = numbers(3, 4, 2) + 100 * ctx.rank
        everyone = torch.zeros(3, 16, 2, dtype=torch.float64)
        for rank in range(4):
            everyone[:, owned(layout, 16, rank)] = numbers(3, 4, 2) + 100 * rank

        (grad,) = torch.autograd.grad((c.shard(x, 1, comm, layout) * weight).sum(), x)
        assert torch.equal(grad, torch.zeros_like(x).index_copy(1, index, weight))
        (grad,) = torch.autograd.grad((c.enter(x, 1, comm, layout) * weight).sum(), x)
        assert torch.equal(grad, everyone)

        y = numbers(3, 4, 2).requires_grad_()
        cotangent = numbers(3, 16, 2) * (ctx.rank + 1)
        total = numbers(3, 16, 2) * 10
        out = c.gather(y, 1, comm, layout)
        assert torch.equal(torch.autograd.grad(out, y, cotangent)[0], total[:, index])
        out = c.gather(y, 1, comm, layout, cotangent="replicated")
        assert torch.equal(torch.autograd.grad(out, y, cotangent)[0], cotangent[:, index])

    run_ranks(fn, SIZES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reduce_scatter_and_its_gradient(layout):
    def fn(ctx):
        comm = ctx.comm(AXES)
        x = (numbers(2, 16, 3) * (ctx.rank + 1)).requires_grad_()
        out = c.reduce_scatter(x, 1, comm, layout)
        assert torch.equal(out, numbers(2, 16, 3)[:, owned(layout, 16, ctx.rank)] * 10)
        cotangent = numbers(2, 16, 3)[:, owned(layout, 16, ctx.rank)]
        assert torch.equal(torch.autograd.grad(out, x, cotangent)[0], numbers(2, 16, 3))

    run_ranks(fn, SIZES)


def test_all_reduce_and_own_cotangent():
    def fn(ctx):
        comm = ctx.comm(AXES)
        x = (numbers(3) + ctx.rank).requires_grad_()
        cotangent = torch.full((3,), ctx.rank + 1.0, dtype=torch.float64)
        out = c.all_reduce(x, comm)
        assert torch.equal(out, numbers(3) * 4 + 6)
        assert torch.autograd.grad(out, x, cotangent)[0].tolist() == [10, 10, 10]
        out = c.all_reduce(x, comm, cotangent="replicated")
        assert torch.equal(torch.autograd.grad(out, x, cotangent)[0], cotangent)
        out = c.own_cotangent(x, comm)
        assert torch.equal(out, x)
        kept = torch.autograd.grad(out, x, cotangent)[0]
        assert torch.equal(kept, cotangent if ctx.rank == 0 else torch.zeros(3))
        assert comm.all_reduce(x.detach(), "max").tolist() == [3, 4, 5]

    run_ranks(fn, SIZES)


def test_sum_gradient_is_the_identity_whose_cotangents_add_up():
    def fn(ctx):
        x = numbers(3).requires_grad_()
        out = c.sum_gradient(x, ctx.comm(AXES))
        assert torch.equal(out, x)
        cotangent = torch.full((3,), ctx.rank + 1.0, dtype=torch.float64)
        assert torch.autograd.grad(out, x, cotangent)[0].tolist() == [10, 10, 10]

    run_ranks(fn, SIZES)


ORDERS = {"BSHD": (0, 1, 2, 3), "BHSD": (0, 2, 1, 3), "SBHD": (1, 0, 2, 3)}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("degree", [2, 4])
def test_exchange_of_heads_and_tokens_is_exact(degree, batch, order):
    whole = numbers(batch, 8, 4, 3, dtype=torch.int64).permute(order)
    tokens, heads = order.index(1), order.index(2)

    def fn(ctx):
        comm = ctx.comm(("ulysses",))
        mine = whole.chunk(degree, tokens)[ctx.rank]
        by_heads = c.all_to_all(mine, heads, tokens, comm)
        assert torch.equal(by_heads, whole.chunk(degree, heads)[ctx.rank])
        assert torch.equal(c.all_to_all(by_heads, tokens, heads, comm), mine)
        leaf = mine.double().requires_grad_()
        out = c.all_to_all(leaf, heads - 4, tokens - 4, comm)
        cotangent = whole.double().chunk(degree, heads)[ctx.rank].transpose(0, 1)
        (grad,) = torch.autograd.grad(out.transpose(0, 1), leaf, cotangent)
        assert torch.equal(grad, mine.double())
        return not mine.is_contiguous()

    assert any(run_ranks(fn, {"ulysses": degree})) or batch == 1 or order[0] == 1


def test_exchange_of_expanded_and_fused_views():
    def fn(ctx):
        comm = ctx.comm(("ulysses",))
        expanded = numbers(2, 4, 1, 3).expand(2, 4, 2, 3)
        out = c.all_to_all(expanded, 2, 1, comm)
        assert torch.equal(out, numbers(2, 4, 1, 3).repeat(1, 2, 1, 1))
        chunk = numbers(2, 4, 6).chunk(3, -1)[1]
        assert torch.equal(c.all_to_all(chunk, 2, 1, comm)[:, :4], chunk[..., ctx.rank :][..., :1])

    run_ranks(fn, {"ulysses": 2})


def test_bytes_and_labels_of_every_collective():
    def fn(ctx):
        comm = ctx.comm(AXES)
        layout = SequenceLayout("zigzag", 2, 2)
        x = torch.zeros(2, 16, 3, requires_grad=True)
        n = x.numel() * 4
        local = c.enter(x, 1, comm, layout, label="a")
        full = c.gather(local, 1, comm, layout, label="b")
        part = c.reduce_scatter(full, 1, comm, layout, label="c")
        c.all_reduce(part, comm, label="d").sum().backward()
        rows = {(r.kind, r.label, r.phase): r.bytes_sent for r in ctx.traffic.rows()}
        assert rows == {
            ("all_gather", "b", "forward"): 3 * n // 4,
            ("reduce_scatter", "c", "forward"): 3 * n // 4,
            ("all_reduce", "d", "forward"): 2 * 3 * (n // 4) // 4,
            ("all_reduce", "d", "backward"): 2 * 3 * (n // 4) // 4,
            ("all_gather", "c", "backward"): 3 * n // 4,
            ("reduce_scatter", "b", "backward"): 3 * n // 4,
            ("all_gather", "a", "backward"): 3 * n // 4,
        }
        assert {r.axis for r in ctx.traffic.rows()} == {"ring+ulysses"}
        assert ctx.traffic.bytes(kind="all_gather") == 9 * n // 4
        assert ctx.traffic.bytes(axis="ring", phase="forward") == 0
        ctx.traffic.reset()
        assert ctx.traffic.rows() == []

    run_ranks(fn, SIZES)


def test_a_group_of_one_sends_nothing_and_copies():
    def fn(ctx):
        comm = ctx.comm(("ring",))
        x = numbers(1, 4).requires_grad_()
        for out in (
            c.shard(x, 1, comm),
            c.gather(x, 1, comm),
            c.reduce_scatter(x, 1, comm),
            c.all_reduce(x, comm),
            c.all_to_all(x, 1, 0, comm),
        ):
            assert torch.equal(out, x)
            assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones_like(x))
        assert ctx.traffic.rows() == []

    run_ranks(fn, {"ring": 1})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_modes(mode):
    def fn(ctx):
        comm = ctx.comm(AXES)
        x = numbers(16, 2).requires_grad_()
        with mode():
            out = c.gather(c.shard(x, 0, comm), 0, comm)
            assert torch.equal(out, x)
            assert not out.requires_grad

    run_ranks(fn, SIZES)


def test_second_derivatives_are_refused_rather_than_wrong():
    def fn(ctx):
        x = numbers(4).requires_grad_()
        y = c.gather(x * x, 0, ctx.comm(("ring",)))
        (grad,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    run_ranks(fn, {"ring": 2})
