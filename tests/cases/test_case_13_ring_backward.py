"""Case 13: the backward of a ring uses the K/V block of its step, and dK/dV come home."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqcomp.layout.masks import Causal, Full
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.attention import AttentionPlan, attention, ring
from seqcomp.runtime.comm import RankContext
from seqcomp.runtime.threads import run_ranks
from tests.fixtures.sharded_attention import Case, errors

LAYOUTS = ("contiguous", "zigzag", "striped")
LENGTHS = {2: 16, 3: 12, 4: 16}
TOLERANCE = 1e-10


def case(degree: int, layout: str, *, transport: str = "p2p", causal: bool = True) -> Case:
    """B = 2, 4 query and 2 KV heads, d = 8, a random upstream gradient, fp64."""
    return Case({"ring": degree}, layout, transport, causal=causal, length=LENGTHS[degree])


def worst(given: Case) -> list[float]:
    """Largest error of out, dq, dk and dv over the ranks."""
    ranks = run_ranks(lambda ctx: errors(ctx, given), given.sizes)
    return [max(column) for column in zip(*ranks, strict=True)]


@pytest.mark.parametrize("transport", ["p2p", "allgather"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("degree", LENGTHS)
def test_gradients_are_those_of_one_device(
    degree: int, layout: str, causal: bool, transport: str
) -> None:
    assert max(worst(case(degree, layout, transport=transport, causal=causal))) < TOLERANCE


@pytest.mark.parametrize("degree", LENGTHS)
def test_control_stale_keys_are_seen(degree: int, monkeypatch: Any) -> None:
    """Every step of the backward reads what was saved at step 0: the forward stays right."""
    blocks = ring._blocks

    def stale(
        view: ring.Ring, k: Tensor, v: Tensor, phase: str
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        for source, *rotated in blocks(view, k, v, phase):
            yield (source, k, v) if phase == "backward" else (source, *rotated)

    monkeypatch.setattr(ring, "_blocks", stale)
    out, *gradients = worst(case(degree, "contiguous", causal=False))
    assert out < TOLERANCE
    assert min(gradients) > 1e-2


def test_control_a_hop_too_few_is_seen(monkeypatch: Any) -> None:
    """What the other ranks add to dK and dV does not come home."""

    def at_home(self: ring._Travelling) -> tuple[Tensor, Tensor]:
        if self._arriving is not None:
            self._arriving.wait()
        dk, dv = (own.result() for own in self._home)
        return dk, dv

    monkeypatch.setattr(ring._Travelling, "result", at_home)
    out, dq, *gradients = worst(case(3, "zigzag"))
    assert max(out, dq) < TOLERANCE
    assert min(gradients) > 1e-2


class _OnTwoRanks(torch.autograd.Function):
    """A ring of two ranks as one function of the global q, k and v [B, H, S, d]."""

    @staticmethod
    def forward(ctx: Any, causal: bool, layout: str, *given: Tensor) -> Tensor:
        ctx.causal, ctx.layout = causal, layout
        ctx.save_for_backward(*given)
        outs, _ = _rings(causal, layout, given, None)
        return outs

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        _, gradients = _rings(ctx.causal, ctx.layout, ctx.saved_tensors, dout)
        return None, None, *gradients


def _rings(
    causal: bool, kind: str, given: tuple[Tensor, ...], dout: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """The output and, with a cotangent, dq, dk and dv, in global order."""
    layout = SequenceLayout(kind, 2)
    length = given[0].shape[2]
    plan = AttentionPlan(Causal() if causal else Full(), layout)
    places = [torch.tensor(layout.token_index(length, rank)) for rank in range(2)]

    def on_rank(ctx: RankContext) -> list[Tensor]:
        own = places[ctx.rank]
        with torch.enable_grad():
            q, k, v = (x.detach()[:, :, own].requires_grad_() for x in given)
            out = attention(q, k, v, plan, ring=ctx.comm(("ring",)), label="attn")
        if dout is None:
            return [out.detach()]
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout[:, :, own])]

    ranks = run_ranks(on_rank, {"ring": 2})
    order = torch.cat(places).argsort()
    out, *gradients = (torch.cat(parts, 2)[:, :, order] for parts in zip(*ranks, strict=True))
    return out, gradients


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck(layout: str, causal: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(1, heads, 4, 2, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (2, 1, 1)
    )
    out = _OnTwoRanks.apply(causal, layout, q, k, v)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(out, want, rtol=0, atol=TOLERANCE)
    assert torch.autograd.gradcheck(
        lambda *given: _OnTwoRanks.apply(causal, layout, *given), (q, k, v)
    )
