"""LSTM, GRU and RNN layers: refused along the tokens, exact with the override that the error
gives, and each rank's own affair where tokens are the samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import seqcomp
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.idioms import VOCAB, D, attend

Kind = type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]
S = 4  # torch traces a recurrent layer token by token: short is quick
# kind, layers, directions, batch first
KINDS = (
    (nn.LSTM, 2, 2, False, plans.with_data(plans.ulysses(2), 2)),
    (nn.GRU, 1, 2, True, plans.ring(2, "zigzag")),
    (nn.RNN, 2, 1, True, plans.ring(2)),
)


class Model(nn.Module):
    """Causal attention, then a recurrent layer over the tokens; its last state comes back too."""

    def __init__(self, kind: Kind, layers: int, directions: int, batch_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.mix = nn.Linear(D, D)
        self.layer = kind(D, D // 2, layers, bidirectional=directions == 2, batch_first=batch_first)
        self.head = nn.Linear(D // 2, VOCAB)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        x = x + attend(self.mix(x), x, x, is_causal=True)
        y, state = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        y = y if self.layer.batch_first else y.transpose(0, 1)
        y = y.unflatten(-1, (-1, D // 2)).sum(-2)
        ends = state[0] if isinstance(state, tuple) else state
        return self.head(y), ends.transpose(0, 1)


class Words(nn.Module):
    """The features of a token are a sequence of their own, as characters of a word are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.layer = nn.LSTM(2, D, batch_first=True)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        _, (ends, _) = self.layer(self.embed(ids).view(-1, D // 2, 2))
        x = ends[-1].view(*ids.shape, D)
        return self.head(x + attend(x, x, x, is_causal=True))


def ids() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)
    return {"ids": torch.randint(0, VOCAB, (2, S), generator=made)}


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build().double()


@pytest.mark.parametrize(("kind", "layers", "directions", "first", "plan"), KINDS)
def test_refused_and_exact_with_the_override_of_the_error(
    kind: Kind, layers: int, directions: int, first: bool, plan: plans.Plan
) -> None:
    model = partial(made, partial(Model, kind, layers, directions, first))
    with pytest.raises(seqcomp.PlanError) as caught:
        seqcomp.verify(model, plan, inputs_fn=ids)
    (found,) = caught.value.diagnostics
    assert (found.code, found.where) == ("SC315", "layer")
    override = yaml.safe_load(str(found.help).partition(": ")[2])
    report = seqcomp.verify(model, {**plan, **override}, inputs_fn=ids)
    assert report.ok, str(report)


@pytest.mark.parametrize("plan", [plans.ring(2, "zigzag"), KINDS[0][-1]], ids=plans.name)
def test_over_another_dim_every_rank_runs_its_own_tokens(plan: plans.Plan) -> None:
    model = partial(made, Words)
    assert seqcomp.verify(model, plan, inputs_fn=ids).ok
    ranks = 4 if "data" in plan["mesh"] else 2

    def samples(model: nn.Module, context: RankContext, local: dict[str, Any]) -> list[int]:
        model(**local)  # compiles
        with Samples() as seen:
            model(**local)
        assert not any(f.code == "SC401" for f in seqcomp.of(model).report().findings)
        return seen.found

    assert lockstep(model, plan, samples, inputs=ids()) == [[2 * S // ranks]] * ranks


class Samples(TorchFunctionMode):
    """The numbers of samples that LSTMs get."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.lstm.input:
            self.found.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def test_whole_tokens_may_and_say_what_they_cost() -> None:
    """A recurrence before the first division: all ranks run it, which is a finding."""
    model = partial(made, lambda: nn.Sequential(nn.RNN(D, D, batch_first=True), Ends()))
    given = {"input": torch.randn(2, S, D, dtype=torch.float64)}

    def codes(model: nn.Module, context: RankContext, local: dict[str, Any]) -> list[str]:
        model(**local)
        return [f"{f.code} {f.where}" for f in seqcomp.of(model).report().findings]

    for found in lockstep(model, plans.ring(2), codes, inputs=given):
        assert "SC402 0" in found, found


class Ends(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return given[0]
