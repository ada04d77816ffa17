"""The report says what the byte counter counts, row by row, forward and backward."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import seqcomp
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import field_of
from tests.fixtures.lockstep import counted, reported, train_once
from tests.fixtures.models import M0, Spec, build, inputs

PLANS = [
    *(plans.ring(2, layout) for layout in plans.LAYOUTS),
    *(plans.ring(4, layout) for layout in plans.LAYOUTS),
    plans.ring(2, transport="allgather"),
    plans.ring(4, transport="allgather"),
    plans.ulysses(2),
    plans.ulysses(4),
    plans.usp(2, 2, "zigzag"),
    plans.usp(2, 2, "striped", ring_outer=False),
    plans.with_data(plans.ring(2, "zigzag"), 2),
]
ONE_LAYER = {
    "gqa": Spec(layers=1, causal=(True,)),
    "mha": Spec(layers=1, causal=(True,), kv_heads=4),
}
IN_TURN = (("gqa", torch.float64), ("mha", torch.bfloat16))
OTHERS = tuple(product(("gqa", "mha"), (torch.float64, torch.float32, torch.bfloat16)))
COMPOSED = (plans.ring(4, "zigzag"), plans.ulysses(4), plans.usp(2, 2, "zigzag"))
CASES = [
    *plans.in_turn([plan for plan in PLANS if plan not in COMPOSED], IN_TURN),
    *product(COMPOSED, OTHERS),
]


@pytest.mark.parametrize(
    ("plan", "case"), CASES, ids=[f"{plans.name(p)}-{h}-{str(d)[6:]}" for p, (h, d) in CASES]
)
def test_report_equals_the_counter(plan: plans.Plan, case: tuple[str, torch.dtype]) -> None:
    heads, dtype = case
    for outcome in train_once(plan, ONE_LAYER[heads], dtype=dtype, batch=2):
        assert reported(outcome.report) == outcome.traffic
        assert {key[3] for key in outcome.traffic} == {"forward", "backward"}


@pytest.mark.parametrize(
    "spec",
    [
        Spec(tied=True, bias=True),
        Spec(positions="learned", loss="sum"),
        Spec(mixer="cumsum"),
        Spec(labels="padded", transposed=True),
    ],
    ids=["tied", "learned-sum", "cumsum", "transposed"],
)
def test_other_models(spec: Spec) -> None:
    """Tied weights are summed once a use; a mixer is gathered, and scattered in backward."""
    for outcome in train_once(plans.usp(2, 2, "zigzag"), spec):
        assert reported(outcome.report) == outcome.traffic


def test_another_call_of_the_same_program() -> None:
    """Sizes are those of the last call, also where the program was compiled for others."""

    def step(model, context, local):
        model(**local)
        context.traffic.reset()
        field_of(model(**inputs(batch=3, seq=32)), "loss").backward()
        assert len(seqcomp.of(model).programs) == 1
        report = seqcomp.of(model).report()
        assert (report.batch, report.length) == (3, 32)
        return reported(report), counted(context)

    for said, sent in lockstep(build, plans.usp(2, 2), step, inputs=inputs()):
        assert said == sent


def test_without_gradients_nothing_goes_back() -> None:
    def step(model, context, local):
        with torch.no_grad():
            model(**local)
        return seqcomp.of(model).report(), counted(context)

    for report, sent in lockstep(build, plans.usp(2, 2), step, inputs=inputs()):
        assert reported(report) == sent
        assert {row.phase for row in report.comm} == {"forward"}


def test_frozen_parameters_send_no_gradient() -> None:
    def frozen():
        model = build()
        model.requires_grad_(False)
        model.layers[1].mlp.up.weight.requires_grad_(True)
        return model

    def step(model, context, local):
        model(**local)["loss"].backward()
        return seqcomp.of(model).report(), counted(context)

    for report, sent in lockstep(frozen, plans.usp(2, 2), step, inputs=inputs()):
        assert reported(report) == sent
        summed = [(row.count, row.bytes_sent) for row in report.comm if row.module == "gradients"]
        assert summed == [(1, 2 * 3 * build().layers[1].mlp.up.weight.numel() * 8 // 4)]


def test_under_autocast() -> None:
    """Activations travel in bf16, gradients of fp32 parameters in fp32."""

    def step(model, context, local):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**local)["loss"]
        loss.backward()
        return seqcomp.of(model).report(), counted(context)

    def make():
        return build(dtype=torch.float32)

    for report, sent in lockstep(make, plans.usp(2, 2), step, inputs=inputs()):
        assert reported(report) == sent
        assert {row.dtype for row in report.kernels} == {"bfloat16"}


@pytest.mark.parametrize("transport", ["p2p", "allgather"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_only_kv_heads_travel(kv_heads: int, transport: str) -> None:
    """2(P-1)/P * T*Hkv*d*e forward, e + a in place of e backward; T = 32, d = 8, e = a = 8."""
    spec = Spec(kv_heads=kv_heads)
    one = 2 * 3 * 32 * kv_heads * 8 * 8 // 4
    for outcome in train_once(plans.ring(4, transport=transport), spec):
        rows = [row for row in outcome.report.comm if row.module == "layers.0.attn"]
        by_phase = {
            phase: sum(row.bytes_sent for row in rows if row.phase == phase)
            for phase in ("forward", "backward")
        }
        assert by_phase == {"forward": one, "backward": 2 * one}


def test_ulysses_beyond_the_kv_heads() -> None:
    """(P-1)/P^2 * T * (2A + 2*max(Hkv, P)*d) * e, in two exchanges each way."""
    for outcome in train_once(plans.ulysses(4), M0):
        rows = [row for row in outcome.report.comm if row.module == "layers.0.attn"]
        sent = 3 * 32 * (2 * 32 + 2 * 4 * 8) * 8 // 16
        assert [(r.phase, r.count, r.bytes_sent) for r in rows] == [
            ("forward", 2, sent), ("backward", 2, sent),
        ]  # fmt: skip
