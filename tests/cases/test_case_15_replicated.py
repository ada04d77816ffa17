"""Case 15: gradients of replicated parameters are complete, frozen ones cost nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.runtime.comm import Arrived, Communicator, RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import CLEARLY_WRONG, compare_grads, gradients_of, reference
from tests.fixtures.lockstep import train_once, whole_gradients
from tests.fixtures.models import Spec, build, initialise, inputs

BIASED = Spec(bias=True, head_bias=True)
PLANS = [
    plans.megatron(4),
    plans.with_tensor(plans.ring(2, "zigzag"), 2),
    plans.with_data(plans.megatron(2), 2),
]


class Normed(nn.Module):
    """The decoder with a LayerNorm, weight and bias, in the place of its last norm."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.lm = build(spec)
        self.lm.norm = nn.LayerNorm(spec.hidden, dtype=torch.float64)
        initialise(self.lm.norm, 3)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return self.lm(input_ids, labels)


class Adapter(nn.Module):
    """LoRA by hand: a frozen linear and two thin factors beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float64)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


def adapted(spec: Spec = BIASED) -> nn.Module:
    model = build(spec).requires_grad_(False)
    for layer in model.layers:
        for name in ("q", "o"):
            adapter = Adapter(getattr(layer.attn, name))
            initialise(adapter.down, 5)
            initialise(adapter.up, 6)
            setattr(layer.attn, name, adapter)
    return model


def embedding_only() -> nn.Module:
    model = build(BIASED).requires_grad_(False)
    model.emb.requires_grad_(True)
    return model


def train(model: nn.Module, batches: list[dict[str, Any]]) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_norms_and_biases(plan: plans.Plan) -> None:
    """Norm weights and biases, and the biases behind row-parallel linears."""
    want = reference(lambda: Normed(BIASED), inputs(BIASED))

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        model(**local)["loss"].backward()
        return compare_grads(want.gradients, whole_gradients(model, context))

    for gradient, worst in lockstep(lambda: Normed(BIASED), plan, step, inputs=inputs(BIASED)):
        assert gradient <= 1, worst


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
@pytest.mark.parametrize("make", [adapted, embedding_only], ids=["lora", "embedding"])
def test_frozen_base(make: Any, plan: plans.Plan) -> None:
    """Three steps: trainable names, gradients, weights and bytes are as they should be."""
    batches = [inputs(BIASED, seed=seed) for seed in (1, 2, 3)]
    alone = make()
    trainable = {name for name, p in alone.named_parameters() if p.requires_grad}
    want = reference(make, batches[0])
    train(alone, batches)

    def steps(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        model(**local)
        cuts = seqcomp.of(model).programs[-1].cuts
        assert {name for name, p in model.named_parameters() if p.requires_grad} == trainable
        context.traffic.reset()
        model(**local)["loss"].backward()
        labels = {row.label for row in context.traffic.rows() if row.phase == "backward"}
        gradients = whole_gradients(model, context)
        assert {name for name, g in gradients.items() if g is not None} == trainable
        frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
        assert not labels & frozen
        part = context.coords.get("data", 0)
        parts = context.sizes.get("data", 1)
        train(model, [{k: v.chunk(parts)[part] for k, v in b.items()} for b in batches])
        own = {n: p.detach().clone() for n, p in model.named_parameters()}
        codes = {f.code for f in seqcomp.of(model).report().findings}
        return compare_grads(want.gradients, gradients), own, set(cuts), codes

    ranks = lockstep(make, plan, steps, inputs=batches[0])
    first = ranks[0][1]
    for (gradient, worst), own, cuts, codes in ranks:
        assert gradient <= 1, worst
        assert "SC401" not in codes
        for name, value in own.items():
            if name not in cuts:
                assert torch.equal(value, first[name]), f"the copies of {name} drift apart"
                full = dict(alone.named_parameters())[name]
                torch.testing.assert_close(value, full.detach(), rtol=1e-7, atol=1e-9)
        if make is adapted:  # the adapters' outer factors are cut like their bases
            assert {"layers.0.attn.q.up.weight", "layers.0.attn.o.down.weight"} <= cuts
            assert {"layers.0.attn.q.base.weight", "layers.0.attn.o.base.weight"} <= cuts


def test_control_a_part_of_a_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody adds up what the ranks have of a replicated parameter's gradient."""
    original = Communicator.start_all_reduce

    def forgotten(self: Communicator, x: Tensor, *args: Any, label: str = "", **kwargs: Any) -> Any:
        if label == "gradients":
            return Arrived([x.clone()])
        return original(self, x, *args, label=label, **kwargs)

    monkeypatch.setattr(Communicator, "start_all_reduce", forgotten)
    assert all(o.gradient > CLEARLY_WRONG for o in train_once(plans.megatron(4), BIASED))


def test_control_all_frozen_but_one_has_a_gradient() -> None:
    model = embedding_only()
    model(**inputs(BIASED))["loss"].backward()
    found = gradients_of(model)
    assert [name for name, g in found.items() if g is not None] == ["emb.weight"]
