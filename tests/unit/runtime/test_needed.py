"""Only what is needed travels: the same attention, and the bytes that each rank gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqcomp.layout.masks import Band, Causal, Mask
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.layout.travel import travel_of
from seqcomp.runtime.attention import attention
from seqcomp.runtime.attention.needed import Returned
from seqcomp.runtime.attention.pair_mask import Apply, Leaf, PairMask, Position
from seqcomp.runtime.attention.tiling import DataTiling
from seqcomp.runtime.threads import run_ranks
from tests.fixtures.sharded_attention import Case, errors, run_sharded

LAYOUTS = ("contiguous", "zigzag", "striped")
TRANSPORTS = ("p2p", "allgather")
RINGS = ({"ring": 2}, {"ring": 4}, {"ring": 2, "ulysses": 2})
BANDS = (Band(0, 2), Band(0, 7), Band(-3, 2), Band(None, 1), Band(3, 9), Band(-9, -2), Band(0, 0))
aten = torch.ops.aten


def worst(case: Case) -> float:
    return max(max(each) for each in run_ranks(lambda ctx: errors(ctx, case), case.sizes))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", RINGS, ids=["ring2", "ring4", "usp2x2"])
def test_bands_equal_attention(sizes: dict[str, int], layout: str, transport: str) -> None:
    for rule in BANDS:
        case = Case(sizes, layout, transport, rule=rule, length=48)
        assert worst(case) < 1e-10, case


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_of_many_tiles(layout: str, transport: str) -> None:
    for rule in (Band(0, 299), Band(-150, 200)):
        case = Case({"ring": 2}, layout, transport, rule=rule, length=1600, batch=1)
        assert worst(replace(case, heads=2, kv_heads=1)) < 1e-10, case


def test_positive_control_gradients_that_do_not_come_back_are_caught(monkeypatch: Any) -> None:
    monkeypatch.setattr(Returned, "_take", lambda *args: None)
    for transport in TRANSPORTS:
        case = Case({"ring": 2}, transport=transport, rule=Band(0, 5), length=48)
        found = run_ranks(lambda ctx, case=case: errors(ctx, case), case.sizes)
        out, dq, dk, dv = (max(column) for column in zip(*found, strict=True))
        assert max(out, dq) < 1e-10
        assert min(dk, dv) > 0.1


def sent(case: Case) -> list[tuple[int, int]]:
    """(forward, backward) bytes that each rank sends."""

    def fn(ctx: Any) -> tuple[int, int]:
        run_sharded(ctx, case)
        return ctx.traffic.bytes("ring", "forward"), ctx.traffic.bytes("ring", "backward")

    return run_ranks(fn, case.sizes)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bytes_are_those_of_the_window_at_any_length(
    layout: str, transport: str, dtype: torch.dtype
) -> None:
    window, found = 6, []
    for length in (64, 128, 512):
        case = Case(
            {"ring": 4}, layout, transport, rule=Band(0, window - 1), length=length, dtype=dtype
        )
        found.append(sent(case))
        token = case.batch * case.kv_heads * 2 * case.head_dim * dtype.itemsize
        # A block or two chunks, each with w - 1 keys before it that are somebody else's; two
        # chunks in the middle of a zigzag are neighbours, and nothing is before the first.
        edges = 3 if layout == "contiguous" else 6
        assert sum(forward for forward, _ in found[-1]) == edges * (window - 1) * token
        assert sum(backward for _, backward in found[-1]) == 2 * edges * (window - 1) * token
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_needs_nothing_gets_nothing(transport: str) -> None:
    """Of a causal window the first block needs nothing, and nobody needs the last."""
    case = Case({"ring": 4}, transport=transport, rule=Band(0, 3), length=64)
    found = sent(case)
    assert found[3][0] == 0
    assert all(forward > 0 for forward, _ in found[:3])
    token = case.batch * case.kv_heads * 2 * case.head_dim * 8
    # Rank 0 sends its keys twice, rank 3 the gradients of those that it got.
    assert (found[0], found[3]) == ((3 * token, 3 * token), (0, 3 * token))


def test_messages_are_counted_where_something_is_sent() -> None:
    def fn(ctx: Any) -> list[tuple[str, int, str]]:
        run_sharded(ctx, case)
        return [(r.kind, r.count, r.phase) for r in ctx.traffic.rows()]

    case = Case({"ring": 4}, rule=Band(0, 3), length=64)
    assert run_ranks(fn, case.sizes) == [
        [("p2p", 1, "forward"), ("p2p", 1, "backward")],
        [("p2p", 1, "forward"), ("p2p", 2, "backward")],
        [("p2p", 1, "forward"), ("p2p", 2, "backward")],
        [("p2p", 1, "backward")],
    ]
    case = replace(case, transport="allgather")
    assert run_ranks(fn, case.sizes) == [
        [("all_gather", 1, "forward"), ("all_gather", 1, "backward"),
         ("reduce_scatter", 1, "backward")]
    ] * 4  # fmt: skip


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_of_the_whole_sequence_costs_a_ring(layout: str, transport: str) -> None:
    case = Case({"ring": 4}, layout, transport, rule=Band(-47, 47), length=48)
    assert sent(case) == [case.expected_bytes()] * 4


# Masks of data -----------------------------------------------------------------------------------

SAME_DOCUMENT = Apply(aten.eq.Tensor, (Leaf(0), Leaf(1)))
BEFORE = Apply(aten.le.Tensor, (Position("key"), Position("query")))
PREFIX = Apply(aten.lt.Tensor, (Position("key"), Leaf(0)))


def documents(length: int, *starts: int) -> tuple[PairMask, list[Tensor]]:
    number = torch.zeros(length, dtype=torch.long)
    for start in starts:
        number[start:] += 1
    leaves = [number.view(1, 1, -1, 1), number.view(1, 1, 1, -1)]
    return PairMask(Apply(aten.logical_and.default, (BEFORE, SAME_DOCUMENT))), leaves


def prefix(keys: int) -> tuple[PairMask, list[Tensor]]:
    """Causal within a window, and everybody sees the first keys."""
    near = Apply(aten.lt.Scalar, (Apply(aten.sub.Tensor, (Position("query"), Position("key"))), 9))
    window = Apply(aten.logical_and.default, (BEFORE, near))
    leaf = torch.tensor(keys).view(1, 1, 1, 1)
    return PairMask(Apply(aten.logical_or.default, (window, PREFIX))), [leaf]


def on_ranks(case: Case, mask: PairMask, leaves: list[Tensor]) -> list[tuple[float, int, int]]:
    """(largest error, forward bytes, backward bytes) of each rank."""
    at = torch.arange(case.length)
    q, k, v, dout = (x.requires_grad_() for x in case.inputs())
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask.evaluate(leaves, at, at), enable_gqa=True
    )
    expected = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    groups = ("ring", "ulysses")

    def fn(ctx: Any) -> tuple[float, int, int]:
        inputs = [case.local(x.detach(), ctx).requires_grad_() for x in (q, k, v)]
        tiling = DataTiling(mask, leaves, case.plan.layout, case.length, torch.device("cpu"))
        comms = {name: ctx.comm((name,)) for name in groups if name in case.sizes}
        out = attention(*inputs, replace(case.plan, mask=None), tiling, **comms)
        got = [out, *torch.autograd.grad(out, inputs, case.local(dout, ctx))]
        wrong = max(
            (a - case.local(b, ctx)).abs().max().item() for a, b in zip(got, expected, strict=True)
        )
        traffic = ctx.traffic
        return wrong, traffic.bytes("ring", "forward"), traffic.bytes("ring", "backward")

    return run_ranks(fn, case.sizes)


def lower_bound(case: Case, mask: PairMask, leaves: list[Tensor]) -> int:
    """Keys that some query of another rank sees."""
    layout, at = case.plan.layout, torch.arange(case.length)
    seen = mask.evaluate(leaves, at, at).expand(1, 1, case.length, case.length)[0, 0]
    ranks = [
        torch.tensor([p for part in layout.ring_ranges(case.length, r) for p in part])
        for r in range(layout.ring)
    ]
    pairs = itertools.permutations(range(layout.ring), 2)
    return sum(int(seen[ranks[q]][:, ranks[k]].any(0).sum()) for q, k in pairs)


def masks_of_data(length: int) -> Iterator[tuple[PairMask, list[Tensor]]]:
    yield documents(length, length // 8, length // 2 + 5, length - 17)
    yield documents(length, *range(0, length, 40))
    yield prefix(5)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", RINGS, ids=["ring2", "ring4", "usp2x2"])
def test_masks_of_data_equal_attention(sizes: dict[str, int], layout: str, transport: str) -> None:
    case = Case(sizes, layout, transport, length=192)
    for mask, leaves in masks_of_data(case.length):
        for wrong, forward, backward in on_ranks(case, mask, leaves):
            assert wrong < 1e-10
            ring = case.length // case.ring * (case.ring - 1) * 2 * 2 * 2 * 8 * 8 // case.ulysses
            assert forward <= ring
            assert backward <= 2 * ring


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_documents_cost_what_their_intervals_do(layout: str, transport: str) -> None:
    case = Case({"ring": 4}, layout, transport, length=2048, batch=1, heads=2, kv_heads=1)
    mask, leaves = documents(case.length, 350, 750, 1111, 1500)
    found = on_ranks(case, mask, leaves)
    token = 2 * case.head_dim * 8
    least = lower_bound(case, mask, leaves) * token
    assert least <= sum(forward for _, forward, _ in found) <= 1.1 * least
    assert 2 * least <= sum(backward for _, _, backward in found) <= 2.2 * least
    assert max(wrong for wrong, _, _ in found) < 1e-10


def test_documents_within_ranks_send_nothing() -> None:
    case = Case({"ring": 4}, length=256)
    mask, leaves = documents(case.length, *range(0, 256, 32))
    assert [(f, b) for _, f, b in on_ranks(case, mask, leaves)] == [(0, 0)] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", [Causal(), Band(0, 30)], ids=["causal", "window"])
def test_a_program_needs_what_its_rule_needs(rule: Mask, layout: str) -> None:
    """A rule on positions and the same rule as a program: every key that is seen travels."""
    ring, length = 4, 256
    near = Apply(aten.le.Scalar, (Apply(aten.sub.Tensor, (Position("query"), Position("key"))), 30))
    window = Apply(aten.logical_and.default, (BEFORE, near))
    program = PairMask(BEFORE if rule == Causal() else window)
    plan = SequenceLayout(layout, ring)
    tiling = DataTiling(program, [], plan, length, torch.device("cpu"))
    travel = tiling.travel()
    if travel is None:
        assert layout == "striped"
        return
    ranks = [[p for part in plan.ring_ranges(length, r) for p in part] for r in range(ring)]
    for receiver, source in itertools.permutations(range(ring), 2):
        sent = {key for run in travel.needs[receiver][source] for key in run}
        for place, k in enumerate(ranks[source]):
            if any(rule.visible(q, k) for q in ranks[receiver]):
                assert place in sent
        for task in tiling.tasks(receiver, source):
            assert set(range(task.k_start, task.k_stop)) <= sent
    exact = travel_of(rule, plan, length)
    if exact is not None:
        for rank in range(ring):
            assert sum(travel.sent(rank)) >= sum(exact.sent(rank))
