"""Convolutions, shifts, running sums and single tokens: exact, and the sequence is not gathered."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import seqcomp
from seqcomp.lowering import ops
from seqcomp.runtime import neighbours
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import mixing, plans
from tests.fixtures.exports import exported_once
from tests.fixtures.idioms import D, Idiom, Raw, tokens
from tests.fixtures.lockstep import counted
from tests.fixtures.on_ranks import assert_exact, assert_refused, model_of

ZIGZAG = plans.ring(2, "zigzag")
PLANS = {
    "contiguous": plans.ring(2, "contiguous"),
    "ulysses": plans.ulysses(2),
    "usp": plans.usp(2, 2, "zigzag"),
    "data": plans.with_data(plans.ring(2, "contiguous"), 2),
}
TOGETHER = {name: partial(mixing.Together, parts) for name, parts in mixing.GROUPS.items()}
TENSOR = plans.with_tensor(ZIGZAG, 2)


def idiom(name: str, plan: plans.Plan = ZIGZAG) -> Idiom:
    return Idiom(name, mixing.ALL[name], lambda: tokens(4, 16), plan)


def together(group: str, plan: plans.Plan, length: int = 16) -> Idiom:
    return Idiom(group, TOGETHER[group], lambda: tokens(4, length), plan)


def report_of(case: Idiom) -> tuple[set[str], set[type]]:
    """Codes of the findings, and the operations of the lowered graph."""

    def step(model: nn.Module, context: RankContext, local: Any) -> tuple[set[str], set[type]]:
        model(**case.call())
        program = seqcomp.of(model).programs[-1]
        return {f.code for f in program.findings}, {type(n.target) for n in program.flat.nodes}

    with exported_once(case.build):
        return lockstep(lambda: model_of(case), case.plan, step)[0]


@pytest.mark.parametrize("name", mixing.ALL)
def test_each_is_exact_and_gathers_nothing(name: str) -> None:
    assert_exact(idiom(name))
    codes, found = report_of(idiom(name))
    assert "SC408" in codes
    assert not codes & {"SC401", "SC402"}
    form = ops.Windowed if name in mixing.NEIGHBOURS else ops.RunningSum
    assert (ops.TokensAt if name in mixing.TOKENS else form) in found


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("group", mixing.GROUPS)
def test_under_every_plan(group: str, plan: str) -> None:
    assert_exact(together(group, PLANS[plan]))


@pytest.mark.parametrize("group", mixing.GROUPS)
def test_beside_a_tensor_axis(group: str) -> None:
    case = together(group, TENSOR)
    with exported_once(case.build):
        report = seqcomp.verify(partial(model_of, case), TENSOR, inputs_fn=lambda: _given(16))
    assert report.ok, str(report)
    assert not any("SC401" in finding.partition(":")[0] for finding in report.findings)


@pytest.mark.parametrize("group", mixing.GROUPS)
def test_striped_tokens_have_no_neighbours(group: str) -> None:
    """Single tokens are found in every layout; what needs neighbours is gathered, and exact."""
    case = together(group, plans.ring(2, "striped"))
    assert_exact(case)
    assert ("SC401" in report_of(case)[0]) == (group != "tokens")


@pytest.mark.parametrize("group", [g for g in mixing.GROUPS if g != "max pooling"])
def test_padded_sequences(group: str) -> None:
    """What looks ahead would see the padding: it is gathered, without it."""
    case = together(group, plans.padded(ZIGZAG), length=15)
    assert_exact(case)
    assert ("SC401" in report_of(case)[0]) == (group == "look ahead")


def test_padding_is_refused_where_the_length_is_fixed() -> None:
    case = together("max pooling", plans.padded(ZIGZAG), length=15)
    assert_refused(replace(case, refused="SC212"))


def test_control_gradients_that_do_not_come_back_are_seen(monkeypatch: Any) -> None:
    exchanged = neighbours._exchanged

    def lost(*args: Any) -> list[Tensor]:
        got = exchanged(*args)
        return [torch.zeros_like(x) for x in got] if args[-1] == "backward" else got

    monkeypatch.setattr(neighbours, "_exchanged", lost)
    with pytest.raises(Exception, match="gradient"):
        assert_exact(idiom("causal convolution"))


@settings(max_examples=12, deadline=None)
@given(
    kernel=st.integers(1, 5),
    dilation=st.integers(1, 3),
    early=st.integers(0, 12),
    chunk=st.integers(1, 4),
    plan=st.sampled_from([PLANS["contiguous"], ZIGZAG, PLANS["usp"]]),
)
def test_any_width_at_any_place(
    kernel: int, dilation: int, early: int, chunk: int, plan: plans.Plan
) -> None:
    """Also windows wider than a rank's tokens, and wider than the sequence."""
    reach = dilation * (kernel - 1)
    before = min(early, reach)

    def mix(model: nn.Module, x: Tensor) -> Tensor:
        padded = F.pad(x.mT, (before, reach - before))
        return model.conv(padded).mT * x

    make = partial(Raw, mix)
    case = Idiom(
        "convolution",
        lambda: make(conv=nn.Conv1d(D, D, kernel, dilation=dilation)),
        lambda: tokens(2, 4 * chunk),
        plan,
    )
    assert_exact(case)


def test_lengths_share_one_program() -> None:
    case = idiom("causal convolution")

    def step(model: nn.Module, context: RankContext, local: Any) -> int:
        whole = model_of(case)
        for length in (16, 32, 8):
            x = _given(length)["x"]
            torch.testing.assert_close(model(x=x), whole(x), rtol=0, atol=1e-12)
        return len(seqcomp.of(model).programs)

    assert lockstep(lambda: model_of(case), case.plan, step) == [1, 1]


@pytest.mark.parametrize("plan", [PLANS["contiguous"], ZIGZAG], ids=plans.name)
def test_bytes_do_not_grow_with_the_length(plan: plans.Plan) -> None:
    case = idiom("causal convolution", plan)
    sent = {
        length: lockstep(lambda: model_of(case), case.plan, partial(_sent, length=length))
        for length in (16, 64, 256)
    }
    assert sent[16] == sent[64] == sent[256]
    # Each cut between ranks: 3 tokens of 12 numbers in 2 rows. Zigzag over 2 ranks has 2 cuts.
    edges = 2 if plan is ZIGZAG else 1
    assert sum(rank[0] for rank in sent[16]) == edges * 3 * 2 * D * 8
    assert sum(rank[1] for rank in sent[16]) == edges * 3 * 2 * D * 8


@pytest.mark.parametrize("name", ["cumsum", "last", "a token of each row"])
def test_totals_and_tokens_cost_the_same_at_any_length(name: str) -> None:
    case = idiom(name)
    sent = [
        lockstep(lambda: model_of(case), case.plan, partial(_sent, length=length))
        for length in (16, 128)
    ]
    assert sent[0] == sent[1]
    assert all(0 < total <= 2 * 2 * D * 8 for rank in sent[0] for total in rank)


@pytest.mark.parametrize("group", ["look back", "running sums", "tokens"])
@pytest.mark.parametrize("plan", ["usp", "ulysses"])
def test_the_report_bounds_what_is_sent(group: str, plan: str) -> None:
    case = together(group, PLANS[plan])

    def step(model: nn.Module, context: RankContext, local: Any) -> None:
        _sent(model, context, local, length=16)
        promised: Counter[Any] = Counter()
        bounds: set[Any] = set()
        for row in seqcomp.of(model).report().comm:
            key = (row.module, row.kind, row.axis, row.phase)
            promised[key] += row.bytes_sent
            bounds |= {key} if row.at_most else set()
        for key, (_, sent) in counted(context).items():
            assert sent <= promised[key] if key in bounds else sent == promised[key], key

    lockstep(lambda: model_of(case), case.plan, step)


def test_a_position_that_does_not_exist_is_an_error() -> None:
    case = Idiom("index", lambda: Raw(lambda m, x: x[:, torch.tensor([99])]),
                 lambda: tokens(2, 16), ZIGZAG)  # fmt: skip

    def step(model: nn.Module, context: RankContext, local: Any) -> None:
        with pytest.raises(IndexError):
            model(**case.call())

    lockstep(lambda: model_of(case), case.plan, step)


def _given(length: int) -> dict[str, Tensor]:
    return {"x": tokens(4, length)["x"].detach()}


def _sent(model: nn.Module, context: RankContext, local: Any, *, length: int) -> tuple[int, int]:
    """Bytes that this rank sends between its tokens, (forward, backward)."""
    call = tokens(2, length)
    context.traffic.reset()
    model(**call).square().sum().backward()
    return tuple(
        sum(
            row.bytes_sent
            for row in context.traffic.rows()
            if row.phase == phase and row.label not in ("gradients", "x", "output")
        )
        for phase in ("forward", "backward")
    )
