"""Attention whose heads Ulysses does not divide: exact, with masks and sinks of each head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.attention import AttentionPlan, attention
from seqcomp.runtime.attention.pair_mask import Apply, Leaf, PairMask, Position
from seqcomp.runtime.attention.tiling import DataTiling
from seqcomp.runtime.threads import run_ranks
from seqcomp.strategies.base import AttentionShape, total_bytes
from seqcomp.strategies.ring import Ring
from seqcomp.strategies.ulysses import Ulysses
from seqcomp.strategies.usp import Usp
from tests.fixtures.sharded_attention import Case, errors, run_sharded

aten = torch.ops.aten

SHAPES = [  # heads, KV heads, degree
    (6, 3, 2),
    (5, 1, 2),
    (4, 4, 3),
    (4, 1, 3),
    (10, 2, 4),
    (28, 4, 7),
    (12, 3, 5),
    (2, 2, 5),
    (3, 1, 8),
]


def case_of(shape: tuple[int, int, int], ring: int, **options: Any) -> Case:
    heads, kv_heads, degree = shape
    sizes = {"ring": ring, "ulysses": degree} if ring > 1 else {"ulysses": degree}
    length = 4 * ring * degree
    return Case(sizes, "zigzag", heads=heads, kv_heads=kv_heads, length=length, **options)


@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_and_as_many_bytes_as_said(shape: tuple[int, int, int], ring: int) -> None:
    case = case_of(shape, ring)

    def step(ctx: Any) -> Any:
        found = errors(ctx, case)
        ctx.traffic.reset()
        run_sharded(ctx, case)
        return max(found), ctx.traffic.bytes(phase="forward"), ctx.traffic.bytes(phase="backward")

    steps = Usp(Ring(ring), Ulysses(case.ulysses)).comm_steps(
        AttentionShape(case.batch, case.length, shape[0], shape[1], case.head_dim, 8, 8)
    )
    for error, sent, sent_back in run_ranks(step, case.sizes):
        assert error < 1e-10
        assert (sent, sent_back) == (total_bytes(steps, "forward"), total_bytes(steps, "backward"))


@pytest.mark.parametrize("shape", [(10, 2, 4), (28, 4, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = case_of(shape, 1, dtype=dtype)
    first: Any = SimpleNamespace(coords={})
    exact = [case.local(x, first) for x in _alone(replace(case, dtype=torch.float64), None)[:4]]
    found = run_ranks(lambda ctx: run_sharded(ctx, case), case.sizes)[0]
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == dtype
        assert (got - want).norm() / want.norm() < (1e-5 if dtype == torch.float32 else 2e-2)


@dataclass(frozen=True)
class Extras:
    """A slope and a bias of each head, and a sink; all of them trained."""

    slopes: Tensor  # [1, H, 1, 1]
    bias: Tensor  # [1, H, S, S]
    sinks: Tensor  # [H]

    @staticmethod
    def of(case: Case) -> Extras:
        rng = torch.Generator().manual_seed(3)
        shapes = ((1, case.heads, 1, 1), (1, case.heads, case.length, case.length), (case.heads,))
        made = [torch.randn(s, generator=rng, dtype=torch.float64).requires_grad_() for s in shapes]
        return Extras(*made)

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.slopes, self.bias, self.sinks


MASK = PairMask(
    Apply(
        aten.add.Tensor,
        (
            Leaf(1),
            Apply(
                aten.mul.Tensor,
                (Leaf(0), Apply(aten.sub.Tensor, (Position("key"), Position("query")))),
            ),
        ),
    ),
    additive=True,
    trained=(0, 1),
)


def _alone(case: Case, extras: Extras | None) -> list[Tensor]:
    """out, dq, dk, dv and the gradients of the extras in plain operations."""
    q, k, v, dout = case.inputs()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    group = case.heads // case.kv_heads
    scores = q @ k.repeat_interleave(group, 1).mT * case.head_dim**-0.5
    at = torch.arange(case.length)
    if extras is None:
        weights = scores.masked_fill(at[:, None] < at, -torch.inf).softmax(-1)
    else:
        scores = scores + extras.bias + extras.slopes * (at - at[:, None])
        sinks = extras.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        inputs += extras.all
    out = weights @ v.repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize("shape", [(6, 3, 2), (5, 1, 2), (10, 2, 4), (28, 4, 7), (2, 2, 3)])
def test_slopes_biases_and_sinks_follow_their_heads(shape: tuple[int, int, int], ring: int) -> None:
    """Values, and gradients that add up over the ranks to those of one process."""
    case = case_of(shape, ring)
    want = _alone(case, Extras.of(case))

    def step(ctx: Any) -> list[Tensor]:
        own = Extras.of(case)
        q, k, v, dout = (case.local(x, ctx) for x in case.inputs())
        inputs = [x.requires_grad_() for x in (q, k, v)]
        layout = SequenceLayout("zigzag", ring, case.ulysses)
        tiling = DataTiling(MASK, own.all[:2], layout, case.length, q.device)
        plan = AttentionPlan(None, layout)
        groups = {name: ctx.comm((name,)) for name in case.sizes}
        out = attention(q, k, v, plan, tiling, own.sinks, **groups)
        grads = torch.autograd.grad(out, (*inputs, *own.all), dout)
        for got, whole in zip((out, *grads[:3]), want, strict=False):
            torch.testing.assert_close(got, case.local(whole, ctx), rtol=0, atol=1e-10)
        return list(grads[3:])

    ranks = run_ranks(step, case.sizes)
    for parts, whole in zip(zip(*ranks, strict=True), want[4:], strict=True):
        torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=0, atol=1e-10)


def test_no_query_head_is_computed_twice() -> None:
    """Every rank attends with n = ceil(H / P) heads: 28 over 7 is 4 each, not 7."""
    case = case_of((28, 4, 7), 1)

    def step(ctx: Any) -> list[int]:
        seen = []

        def pack(x: Tensor) -> Tensor:
            seen.append(x.shape)
            return x

        inputs = [case.local(x, ctx).requires_grad_() for x in case.inputs()[:3]]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            attention(*inputs, case.plan, ulysses=ctx.comm(("ulysses",)))
        return [shape[1] for shape in seen]

    # q, k, v, out, lse: KV heads are kept once, though several query heads share them unevenly.
    assert run_ranks(step, case.sizes) == [[4, 2, 2, 4, 4]] * 7
