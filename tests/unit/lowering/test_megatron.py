"""Megatron-SP on thread ranks: loss, logits and every gradient equal one process, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import seqcomp
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.faults import assert_shows, scaled, single
from tests.fixtures.lockstep import reported, train_once, whole_gradients
from tests.fixtures.models import Spec, build, inputs

GROUPED = Spec(vocab=96, bias=True)
MANY_HEADS = Spec(vocab=96, bias=True, hidden=64, heads=8, kv_heads=4)


def check(plan: plans.Plan, spec: Spec, ranks: int, **input_args: Any) -> None:
    outcomes = train_once(plan, spec, **input_args)
    assert len(outcomes) == ranks
    for rank, outcome in enumerate(outcomes):
        assert outcome.loss <= 1, rank
        assert outcome.logits <= 1, rank
        assert outcome.gradient <= 1, (rank, outcome.worst)
        said = reported(outcome.report)
        if spec.vocab % plan["mesh"]["tensor"] == 0 or rank == 0:
            assert said == outcome.traffic, rank
            continue
        # The last parts of a vocabulary are shorter, and so are the sums of their gradients.
        assert said.keys() == outcome.traffic.keys(), rank
        for key, (count, sent) in outcome.traffic.items():
            assert said[key][0] == count, (rank, key)
            short = key[0] in ("gradients", "emb.weight", "head.weight", "head.bias")
            assert sent <= said[key][1] if short else sent == said[key][1], (rank, key)


@pytest.mark.parametrize(
    ("degree", "spec"),
    [
        pytest.param(2, GROUPED, id="bias-2"),
        pytest.param(4, GROUPED, id="bias-beyond-kv-4"),
        pytest.param(2, Spec(vocab=97, tied=True, bias=True), id="odd-tied-2"),
        pytest.param(4, Spec(vocab=96, tied=True), id="tied-beyond-kv-4"),
        pytest.param(4, Spec(vocab=97, kv_heads=4), id="odd-vocabulary-4"),
        pytest.param(2, Spec(vocab=96, qk_norm=True), id="qk-norm-2"),
        pytest.param(2, Spec(vocab=96, causal=(False, True), labels="shifted"), id="not-causal-2"),
        pytest.param(4, Spec(vocab=96, positions="learned", loss="divisor"), id="learned-4"),
        pytest.param(2, Spec(vocab=96, transposed=True), id="transposed-logits-2"),
        pytest.param(2, Spec(vocab=96, attention="module", kv_heads=4), id="fused-qkv-2"),
    ],
)
def test_alone(degree: int, spec: Spec) -> None:
    check(plans.megatron(degree), spec, degree)


@pytest.mark.parametrize("layout", plans.LAYOUTS)
def test_in_a_ring(layout: str) -> None:
    check(plans.with_tensor(plans.ring(2, layout), 2), GROUPED, 4)


@pytest.mark.parametrize(
    ("plan", "spec"),
    [
        (plans.with_tensor(plans.ulysses(2), 2), GROUPED),
        (plans.with_data(plans.megatron(2), 2), Spec(vocab=97, tied=True)),
    ],
    ids=lambda x: plans.name(x) if isinstance(x, dict) else "odd-tied" if x.tied else "bias",
)
def test_with_one_other_axis(plan: plans.Plan, spec: Spec) -> None:
    check(plan, spec, 4)


def test_the_tensor_axis_may_be_outermost() -> None:
    """Which ranks are neighbours is the mesh's, the nesting is always ring, ulysses, tensor."""
    plan = {
        "mesh": {"tensor": 2, "ring": 2},
        "strategies": {
            "ring": {"layout": "zigzag", "transport": "allgather"},
            "megatron_sp": {},
        },
    }
    check(plan, GROUPED, 4)


def test_all_four_strategies() -> None:
    """data 2 x ring 2 x ulysses 2 x tensor 2; the second data rank has fewer labels."""
    plan = plans.with_data(plans.with_tensor(plans.usp(2, 2, "zigzag"), 2), 2)
    check(plan, MANY_HEADS, 16, batch=4, ignore_rows=(2,))


def test_64_ranks() -> None:
    """ring 4 x ulysses 8 x tensor 2, with fewer KV heads than ranks of either inner axis."""
    spec = Spec(vocab=96, heads=16, kv_heads=2, head_dim=4, hidden=32, mlp=32, layers=1, table=128)
    check(plans.with_tensor(plans.usp(4, 8, "zigzag"), 2), spec, 64, batch=1, seq=128)


def test_a_lost_or_doubled_sum_is_noticed() -> None:
    """Positive controls: one part of a replicated gradient only, and a gradient counted twice."""
    want = single(GROUPED)
    assert_shows(want, scaled(want, 2.0))
    norm = want.gradients["norm.weight"]
    assert norm is not None
    halved = {**want.gradients, "norm.weight": norm / 2}
    assert_shows(want, type(want)(want.loss, want.logits, halved))


def test_replicated_gradients_are_the_same_on_every_rank() -> None:
    """Case 15: norms, QK-norms, biases after row-parallel linears, and K/V weights beyond the KV
    heads have one gradient, bit for bit, wherever they live."""
    spec = Spec(vocab=96, bias=True, qk_norm=True)

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        model(**local)["loss"].backward()
        cut = set(seqcomp.of(model).programs[-1].cuts)
        return {n: p.grad for n, p in model.named_parameters() if n not in cut}

    first, *others = lockstep(lambda: build(spec), plans.megatron(4), step, inputs=inputs(spec))
    assert {f"layers.0.attn.{n}.weight" for n in ("k", "v", "q_norm", "k_norm")} <= set(first)
    assert {"layers.0.attn.o.bias", "layers.1.mlp.down.bias", "layers.1.n1.weight"} <= set(first)
    for other in others:
        assert set(other) == set(first)
        for name, gradient in first.items():
            assert torch.equal(other[name], gradient), name


def test_frozen_parameters() -> None:
    """No gradient, and no bytes for one; the others are exact."""

    def frozen() -> nn.Module:
        model = build(GROUPED)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name and "layers.1" in name)
        return model

    batch = inputs(GROUPED)
    alone = frozen()
    alone(**batch)["loss"].backward()

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        context.traffic.reset()
        model(**local)["loss"].backward()
        labels = {row.label for row in context.traffic.rows() if row.phase == "backward"}
        return whole_gradients(model, context), labels

    for gradients, labels in lockstep(frozen, plans.megatron(2), step, inputs=batch):
        for name, parameter in alone.named_parameters():
            found = gradients[name]
            if parameter.grad is None:
                assert found is None, name
            else:
                assert found is not None
                torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-12)
        assert not any(label.startswith(("emb", "layers.0")) for label in labels), labels
        assert any(label.startswith("layers.1.mlp") for label in labels)


def test_modes_and_sizes_share_the_cut_parameters() -> None:
    """train, eval, no_grad, another batch and another length, on one compiled module."""

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        model(**local)["loss"].backward()
        parameters = [id(p) for p in model.parameters()]
        values = []
        for training, grad, size in ((False, True, 16), (True, False, 16), (True, True, 32)):
            model.train(training)
            with torch.set_grad_enabled(grad):
                out = model(**inputs(GROUPED, batch=1, seq=size))
            values.append((float(out["loss"].detach()), out["logits"].detach()))
        assert parameters == [id(p) for p in model.parameters()]
        return values

    wanted = [build(GROUPED)(**inputs(GROUPED, batch=1, seq=size)) for size in (16, 16, 32)]
    ranks = lockstep(lambda: build(GROUPED), plans.megatron(2), step, inputs=inputs(GROUPED))
    for values in ranks:
        for (loss, logits), want in zip(values, wanted, strict=True):
            assert loss == pytest.approx(float(want["loss"].detach()), rel=1e-9)
            torch.testing.assert_close(logits, want["logits"].detach(), rtol=1e-9, atol=1e-10)


def test_close_gives_the_whole_parameters_back() -> None:
    models = []

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> None:
        model(**local)
        models.append(model)

    lockstep(lambda: build(GROUPED), plans.megatron(2), step, inputs=inputs(GROUPED))
    original = build(GROUPED).state_dict()
    for model in models:
        assert list(model.state_dict()) == list(original)
        assert all(torch.equal(v, original[k]) for k, v in model.state_dict().items())
