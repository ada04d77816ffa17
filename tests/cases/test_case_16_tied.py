"""Case 16: tied embeddings stay one parameter with one gradient, however they are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import CLEARLY_WRONG, compare_grads, reference
from tests.fixtures.lockstep import whole_gradients
from tests.fixtures.models import Spec, build, initialise, inputs

EVEN, ODD = Spec(vocab=96, tied=True), Spec(vocab=97, tied=True)
LR = 0.1


class Crossed(nn.Module):
    """One weight [32, 32] as the first linear of one MLP and as the last of another."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = build(ODD)
        self.shared = nn.Parameter(torch.empty(32, 32, dtype=torch.float64))
        self.last = nn.Linear(32, 32, bias=False, dtype=torch.float64)
        self.first = nn.Linear(32, 32, bias=False, dtype=torch.float64)
        initialise(self, 4)
        self.lm.head.weight = self.lm.emb.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.lm.emb(input_ids)
        x = x + self.last(torch.tanh(nn.functional.linear(x, self.shared)))  # cut by rows
        x = x + nn.functional.linear(torch.tanh(self.first(x)), self.shared)  # by columns
        x = self.lm.layers[0](x, self.lm.positions(input_ids, None))
        out = {"logits": self.lm.head(self.lm.norm(x))}
        if labels is not None:
            out["loss"] = self.lm.loss(out["logits"], labels, None)
        return out


def train(model: nn.Module, batch: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()


@pytest.mark.parametrize(
    "plan",
    [plans.megatron(4), plans.with_tensor(plans.ring(2), 2), plans.ring(4, "zigzag")],
    ids=plans.name,
)
@pytest.mark.parametrize("spec", [EVEN, ODD], ids=["even", "odd"])
def test_one_parameter_with_one_gradient(spec: Spec, plan: plans.Plan) -> None:
    """(a) both cut by vocabulary, (c) ring alone: same object, one entry, the sum of both uses."""
    batch = inputs(spec)
    alone = build(spec)
    want = reference(lambda: build(spec), batch)
    train(alone, batch)

    def steps(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        names = [name for name, _ in model.named_parameters()]
        keys = list(model.state_dict())
        model(**local)["loss"].backward()
        assert model.head.weight is model.emb.weight
        assert [name for name, _ in model.named_parameters()] == names
        assert list(model.state_dict()) == keys
        gradients = whole_gradients(model, context)
        cuts = set(seqcomp.of(model).programs[-1].cuts)
        train(model, local)
        return compare_grads(want.gradients, gradients), model, cuts

    for (gradient, worst), closed, cuts in lockstep(lambda: build(spec), plan, steps, inputs=batch):
        assert gradient <= 1, worst
        assert closed.head.weight is closed.emb.weight
        weights = {name: p.detach() for name, p in closed.named_parameters()}
        assert bool(cuts & {"emb.weight", "head.weight"}) == ("tensor" in plan["mesh"])
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("degree", [2, 4])
def test_conflicting_uses_keep_the_weight_whole(degree: int) -> None:
    """(b) The plan language has no placements to conflict; uses that do are exact and said."""
    batch = inputs(ODD)
    want = reference(Crossed, batch)

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        model(**local)["loss"].backward()
        found = seqcomp.of(model).report().findings
        cuts = set(seqcomp.of(model).programs[-1].cuts)
        shape = tuple(model.shared.shape)
        gradients = compare_grads(want.gradients, whole_gradients(model, context))
        return gradients, [f.where for f in found if f.code == "SC406"], cuts, shape

    for (gradient, worst), places, cuts, shape in lockstep(
        Crossed, plans.megatron(degree), step, inputs=batch
    ):
        assert gradient <= 1, worst
        assert places == ["shared"]
        assert "shared" not in cuts
        assert shape == (32, 32)
        assert {"last.weight", "first.weight"} <= cuts


def test_control_one_use_alone_is_seen() -> None:
    """The gradient of an embedding that has come apart from its head."""
    want = reference(lambda: build(ODD), inputs(ODD)).gradients["emb.weight"]

    def untied() -> nn.Module:
        model = build(ODD)
        model.head.weight = nn.Parameter(model.emb.weight.detach().clone())
        return model

    apart = reference(untied, inputs(ODD)).gradients["emb.weight"]
    assert compare_grads({"emb": want}, {"emb": apart})[0] > CLEARLY_WRONG
