"""Sequence-parallel attention equals attention, in value, gradient, bytes and work."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from seqcomp.layout.bands import SMALLEST_EDGE
from seqcomp.layout.intervals import work
from seqcomp.layout.masks import Band, Causal, Mask, Tile, tiles
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.attention import AttentionPlan, attention, kernels, ring
from seqcomp.runtime.threads import run_ranks
from tests.fixtures.sharded_attention import Case, errors, reference, run_sharded

LAYOUTS = ("contiguous", "zigzag", "striped")
TRANSPORTS = ("p2p", "allgather")


def worst(case: Case) -> float:
    return max(max(each) for each in run_ranks(lambda ctx: errors(ctx, case), case.sizes))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_ring_equals_attention(degree, layout, transport, causal):
    for batch, kv_heads in ((1, 2), (2, 4), (3, 1)):
        case = Case({"ring": degree}, layout, transport, causal, batch, kv_heads=kv_heads)
        assert worst(case) < 1e-10, case


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("degree", "kv_heads"), [(2, 2), (2, 4), (4, 2), (4, 4), (2, 1), (4, 1)])
def test_ulysses_equals_attention(degree, kv_heads, causal):
    for batch in (1, 2, 3):
        case = Case({"ulysses": degree}, causal=causal, batch=batch, kv_heads=kv_heads)
        assert worst(case) < 1e-10, case


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [{"ring": 2, "ulysses": 2}, {"ulysses": 2, "ring": 2}])
def test_usp_equals_attention_in_both_mesh_orders(sizes, layout):
    for transport, kv_heads in itertools.product(TRANSPORTS, (1, 2)):
        assert worst(Case(sizes, layout, transport, kv_heads=kv_heads)) < 1e-10


def test_many_ranks_in_threads():
    assert worst(Case({"ring": 8, "ulysses": 4}, "zigzag", length=64)) < 1e-10


@pytest.mark.parametrize("offset", [-5, 3])
def test_causal_with_offset_and_rows_that_see_nothing(offset):
    case = Case({"ring": 2}, "zigzag")
    seen = torch.ones(case.length, case.length, dtype=torch.bool).tril(offset)
    q, k, v, dout = (x.requires_grad_() for x in case.inputs())
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    expected = [out, *torch.autograd.grad(out, (q, k, v), dout)]

    def fn(ctx):
        inputs = [case.local(x.detach(), ctx).requires_grad_() for x in (q, k, v)]
        plan = replace(case.plan, mask=Causal(offset))
        out = attention(*inputs, plan, ring=ctx.comm(("ring",)))
        got = [out, *torch.autograd.grad(out, inputs, case.local(dout, ctx))]
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, case.local(b, ctx), rtol=0, atol=1e-10)

    run_ranks(fn, case.sizes)


@pytest.mark.parametrize("window", [130, 257, 300])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_of_triangles_and_no_masks(layout, window):
    """Both edges of a window wider than a tile are triangles that a causal kernel computes."""
    for sizes in ({"ring": 2}, {"ulysses": 2}, {"ring": 2, "ulysses": 2}):
        case = Case(sizes, layout, length=1024, batch=1, rule=Band(0, window - 1))
        assert worst(case) < 1e-10, case
        ring_of = case.plan.layout
        kinds = {
            task.kind
            for i, j in itertools.product(range(case.ring), repeat=2)
            for task in tiles(case.mask, ring_of.ring_ranges(1024, i), ring_of.ring_ranges(1024, j))
        }
        assert Tile.ANTICAUSAL in kinds
        if window // (case.ring if layout == "striped" else 1) > SMALLEST_EDGE:
            assert Tile.PARTIAL not in kinds


class Scattered(Mask):
    """A mask that no kernel knows: causal, and only keys of the query's parity."""

    def visible(self, q: Any, k: Any) -> Any:
        return (k <= q) & ((q + k) % 2 == 0) & (q != 0)

    def split(self, q, k, cut=None):
        return [ring.TileTask(0, len(q), 0, len(k), ring.Tile.PARTIAL)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_tiles_use_their_own_mask(layout):
    case = Case({"ring": 3}, layout)
    i = torch.arange(case.length)
    q, k, v, dout = (x.requires_grad_() for x in case.inputs())
    seen = Scattered().visible(i[:, None], i[None, :])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    expected = [out, *torch.autograd.grad(out, (q, k, v), dout)]

    def fn(ctx):
        inputs = [case.local(x.detach(), ctx).requires_grad_() for x in (q, k, v)]
        out = attention(*inputs, replace(case.plan, mask=Scattered()), ring=ctx.comm(("ring",)))
        got = [out, *torch.autograd.grad(out, inputs, case.local(dout, ctx))]
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, case.local(b, ctx), rtol=0, atol=1e-10)

    run_ranks(fn, case.sizes)


class AllRanks(torch.autograd.Function):
    """The sharded attention seen as one function of global tensors, for gradcheck."""

    @staticmethod
    def forward(ctx, q, k, v, case):
        ctx.save_for_backward(q, k, v)
        ctx.case = case
        return AllRanks.compute(case, (q, k, v))[0]

    @staticmethod
    def backward(ctx, dout):
        return *AllRanks.compute(ctx.case, ctx.saved_tensors, dout)[1], None

    @staticmethod
    def compute(case, tensors, dout=None):
        def fn(ctx):
            inputs = [case.local(x.detach(), ctx).requires_grad_() for x in tensors]
            out = attention(*inputs, case.plan, ring=ctx.comm(("ring",)))
            cotangent = torch.zeros_like(out) if dout is None else case.local(dout, ctx)
            return [out.detach(), *torch.autograd.grad(out, inputs, cotangent)]

        ranks = run_ranks(fn, case.sizes)
        inverse = torch.tensor(case.plan.layout.inverse(case.length))
        out, *grads = (torch.cat(parts, 2)[:, :, inverse] for parts in zip(*ranks, strict=True))
        return out, grads


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck_on_two_ranks(layout):
    case = Case({"ring": 2}, layout, batch=1, heads=2, kv_heads=1, length=4, head_dim=2)
    inputs = [x.requires_grad_() for x in case.inputs()[:3]]
    assert torch.autograd.gradcheck(AllRanks.apply, (*inputs, case))


def test_positive_control_stale_keys_in_backward_are_caught(monkeypatch):
    honest = ring._blocks

    def stale(spec, k, v, phase):
        for source, k_block, v_block in honest(spec, k, v, phase):
            yield (source, k, v) if phase == "backward" else (source, k_block, v_block)

    case = Case({"ring": 2}, "zigzag")
    monkeypatch.setattr(ring, "_blocks", stale)
    found = run_ranks(lambda ctx: errors(ctx, case), case.sizes)
    out, *grads = (max(column) for column in zip(*found, strict=True))
    assert out < 1e-10
    assert min(grads[0], grads[1]) > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        {"ring": 2},
        {"ring": 3},
        {"ring": 4},
        {"ulysses": 2},
        {"ulysses": 4},
        {"ring": 2, "ulysses": 2},
        {"ulysses": 4, "ring": 2},
    ],
)
def test_bytes_are_those_of_the_formulas(sizes, kv_heads, dtype):
    for transport in TRANSPORTS:
        case = Case(sizes, "zigzag", transport, kv_heads=kv_heads, length=48, dtype=dtype)

        def fn(ctx, case=case):
            run_sharded(ctx, case)
            return ctx.traffic

        for traffic in run_ranks(fn, sizes):
            sent = (traffic.bytes(phase="forward"), traffic.bytes(phase="backward"))
            assert sent == case.expected_bytes()
            assert {row.label for row in traffic.rows()} == {"attn"}


def test_rows_of_one_usp_attention():
    case = Case({"ring": 3, "ulysses": 2}, "zigzag")

    def fn(ctx):
        run_sharded(ctx, case)
        return [(r.kind, r.axis, r.count, r.phase) for r in ctx.traffic.rows()]

    expected = [
        ("all_to_all", "ulysses", 2, "forward"),
        ("p2p", "ring", 2, "forward"),
        ("all_to_all", "ulysses", 2, "backward"),
        ("p2p", "ring", 4, "backward"),
    ]
    assert run_ranks(fn, case.sizes) == [expected] * 6


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_work_is_divided_as_the_layout_promises(layout, transport, monkeypatch):
    case = Case({"ring": 4}, layout, transport, length=64)
    computed: Counter[tuple[str, str]] = Counter()
    lock = threading.Lock()
    real = kernels.kernel

    def counting(name, **options):
        inner = real(name, **options)

        def count(phase, q, k, causal):
            rows, columns = q.shape[2], k.shape[2]
            assert not causal or rows == columns
            area = rows * (rows + 1) // 2 if causal else rows * columns
            with lock:
                computed[threading.current_thread().name, phase] += area

        def forward(q, k, v, *, causal, scale, mask=None):
            assert mask is None
            count("forward", q, k, causal)
            return inner.forward(q, k, v, causal=causal, scale=scale)

        def backward(dout, q, k, v, out, lse, *, causal, scale, mask=None):
            assert mask is None
            count("backward", q, k, causal)
            return inner.backward(dout, q, k, v, out, lse, causal=causal, scale=scale)

        return kernels.Kernel(name, forward, backward, grouped=True)

    monkeypatch.setattr(kernels, "kernel", counting)
    run_ranks(lambda ctx: run_sharded(ctx, case), case.sizes)
    share = work(Causal(), SequenceLayout(layout, 4), case.length)
    for rank, phase in itertools.product(range(4), ("forward", "backward")):
        assert computed[f"rank{rank}", phase] == share[rank]


@pytest.mark.parametrize("degree", [2, 4])
def test_fp32_error_against_full_softmax_at_8192_tokens(degree):
    case = Case(
        {"ring": degree},
        causal=False,
        batch=1,
        heads=8,
        kv_heads=8,
        length=8192,
        head_dim=64,
        dtype=torch.float32,
    )
    q, k, v, _ = case.inputs()
    rows = torch.arange(0, case.length, 61)
    exact = F.scaled_dot_product_attention(q[:, :, rows].double(), k.double(), v.double())

    def fn(ctx):
        inputs = (case.local(x, ctx) for x in (q, k, v))
        return attention(*inputs, case.plan, ring=ctx.comm(("ring",)))

    out = torch.cat(run_ranks(fn, case.sizes), 2)[:, :, rows]
    assert (out - exact).abs().max() <= 1e-6


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("gain", [1.0, 4.0])
def test_bf16_error_stays_that_of_one_device_for_any_number_of_ranks(gain, causal):
    shape = Case({}, "zigzag", length=256, causal=causal, head_dim=16, dtype=torch.bfloat16)
    shape = replace(shape, gain=gain, kv_heads=4)
    exact = reference(shape, torch.float64)

    def error(got: list[torch.Tensor]) -> list[torch.Tensor]:
        return [((a - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True)]

    single = error(reference(shape))
    for sizes in ({"ring": 2}, {"ring": 4}, {"ulysses": 2}, {"ulysses": 4}):
        case = replace(shape, sizes=sizes)
        ranks = run_ranks(lambda ctx, case=case: run_sharded(ctx, case), sizes)
        inverse = torch.tensor(case.plan.layout.inverse(case.length))
        got = [torch.cat(parts, 2)[:, :, inverse] for parts in zip(*ranks, strict=True)]
        assert {x.dtype for x in got} == {torch.bfloat16}
        for ours, alone in zip(error(got), single, strict=True):
            assert ours <= 1.5 * alone


def test_autocast_casts_as_attention_does_and_returns_gradients_in_their_dtypes():
    case = Case({"ring": 2}, "zigzag", dtype=torch.float32, length=64)
    q, k, v, dout = case.inputs()

    def fn(ctx):
        inputs = [case.local(x, ctx) for x in (q, k, v.bfloat16())]
        for x in inputs:
            x.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(*inputs, case.plan, ring=ctx.comm(("ring",)))
            alone = F.scaled_dot_product_attention(q, k, v.bfloat16(), enable_gqa=True)
        assert out.dtype == alone.dtype == torch.bfloat16
        grads = torch.autograd.grad(out, inputs, case.local(dout, ctx).bfloat16())
        assert [g.dtype for g in grads] == [torch.float32, torch.float32, torch.bfloat16]
        return [out.detach().float(), *(g.float() for g in grads)]

    for rank, got in enumerate(run_ranks(fn, case.sizes)):
        index = torch.tensor(case.plan.layout.token_index(case.length, rank))
        for a, b in zip(got, reference(case), strict=True):
            torch.testing.assert_close(a, b[:, :, index], rtol=0.05, atol=0.05)


def test_mixed_dtypes_without_autocast_are_refused():
    q, k, v, _ = Case(dtype=torch.float32).inputs()
    plan = AttentionPlan(Causal(), SequenceLayout("contiguous"))
    with pytest.raises(TypeError, match=r"q torch\.float32, k torch\.float32, v torch\.float64"):
        attention(q, k, v.double(), plan)


@pytest.mark.parametrize("sizes", [{"ring": 2}, {"ulysses": 2}, {"ring": 2, "ulysses": 2}])
def test_strided_inputs_and_expanded_cotangents(sizes):
    case = Case(sizes, "zigzag", batch=3, heads=4, kv_heads=4)
    q, k, v, _ = case.inputs()
    k = k[:, :1].expand_as(k)
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True)
    expected = [expected, *torch.autograd.grad(expected.sum(), inputs)]

    def fn(ctx):
        fused = torch.cat([case.local(x, ctx).transpose(1, 2) for x in (q, v)], dim=-1)
        q_view, v_view = (x.transpose(1, 2) for x in fused.chunk(2, dim=-1))
        backwards = case.local(k, ctx).mT.contiguous().mT[:, :1].expand_as(v_view)
        views = [x.detach().requires_grad_() for x in (q_view, backwards, v_view)]
        assert not any(x.is_contiguous() for x in views)
        groups = {name: ctx.comm((name,)) for name in sizes}
        out = attention(*views, case.plan, **groups)
        for a, b in zip([out, *torch.autograd.grad(out.sum(), views)], expected, strict=True):
            torch.testing.assert_close(a, case.local(b, ctx), rtol=0, atol=1e-10)

    run_ranks(fn, sizes)


def test_no_grad_and_inference_mode_give_the_same_values():
    case = Case({"ring": 2, "ulysses": 2}, "zigzag")

    def fn(ctx):
        inputs = [case.local(x, ctx) for x in case.inputs()[:3]]
        groups = {name: ctx.comm((name,)) for name in case.sizes}
        with torch.no_grad():
            first = attention(*inputs, case.plan, **groups)
        with torch.inference_mode():
            second = attention(*inputs, case.plan, **groups)
        assert torch.equal(first, second)
        assert torch.equal(first, run_sharded(ctx, case)[0])

    run_ranks(fn, case.sizes)


def test_what_is_saved_is_one_rank_s_share():
    case = Case({"ring": 2, "ulysses": 2}, "zigzag", length=64, dtype=torch.float32)

    def fn(ctx):
        saved = 0

        def pack(x):
            nonlocal saved
            saved += x.numel()
            return x

        inputs = [case.local(x, ctx).requires_grad_() for x in case.inputs()[:3]]
        groups = {name: ctx.comm((name,)) for name in case.sizes}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            attention(*inputs, case.plan, **groups)
        return saved

    tokens = case.batch * case.length
    share = tokens * (2 * case.heads * 8 + 2 * case.kv_heads * 8 + case.heads) // 4
    assert run_ranks(fn, case.sizes) == [share] * 4
