"""Recurrences over the sequence: refused by name, exact with the override that the error gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from tests.fixtures import plans
from tests.fixtures.idioms import D, S, tokens

PLAN = plans.ring(2, "contiguous")


class Mixer(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.into = nn.Linear(D, D)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.into(x))


class Model(nn.Module):
    """Two layers and a head: x [B, S, D] -> [B, S, D]."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mixer": Mixer(mix)}) for _ in range(2))
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["mixer"](x)
        return self.head(x)


def loop(x: Tensor) -> Tensor:
    state, made = torch.zeros_like(x[:, 0]), []
    for at in range(x.shape[1]):
        state = 0.5 * state + x[:, at]
        made.append(state)
    return torch.stack(made, 1)


def loop_of_slices(x: Tensor) -> Tensor:
    state, made = torch.zeros_like(x[:, :1]), []
    for at in range(x.shape[1]):
        state = (state + x[:, at : at + 1]).tanh()
        made.append(state)
    return torch.cat(made, 1)


def loop_of_parts(x: Tensor) -> Tensor:
    state, made = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = 0.5 * state + token
        made.append(state)
    return torch.stack(made, 1)


def chunked_scan(x: Tensor) -> Tensor:
    """Decays within chunks of four tokens, and a state from chunk to chunk."""
    chunks = x.unflatten(1, (-1, 4))
    decay = (-chunks.square()).cumsum(2).exp()
    ends = (decay * chunks).sum(2)
    before = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
    return (decay * (chunks + before[:, :, None])).flatten(1, 2)


RECURRENT = (loop, loop_of_slices, loop_of_parts, chunked_scan)


def verify(mix: Callable[[Tensor], Tensor], plan: plans.Plan) -> Any:
    return seqcomp.verify(
        partial(made, mix), plan, inputs_fn=lambda: {"x": tokens(2, S)["x"].detach()}
    )


def made(mix: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(7)
    return Model(mix).double()


@pytest.mark.parametrize("mix", RECURRENT)
def test_refused_with_the_place_and_the_override(mix: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(seqcomp.PlanError) as caught:
        verify(mix, PLAN)
    (found,) = caught.value.diagnostics
    assert found.code == "SC315"
    assert found.where == "layers.0.mixer, and 1 more like it"
    assert 'overrides: [{match: "layers.*.mixer", gather: true}]' in found.help


@pytest.mark.parametrize("mix", RECURRENT)
def test_exact_with_the_override(mix: Callable[[Tensor], Tensor]) -> None:
    report = verify(mix, {**PLAN, "overrides": [{"match": "layers.*.mixer", "gather": True}]})
    assert report.ok, str(report)


def test_an_override_of_one_layer_leaves_the_other() -> None:
    with pytest.raises(seqcomp.PlanError) as caught:
        verify(loop, {**PLAN, "overrides": [{"match": "layers.0.mixer", "gather": True}]})
    assert [d.where for d in caught.value.diagnostics] == ["layers.1.mixer"]


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x * x[:, 0:1] + x[:, -1:] + x[:, 3:4],
        lambda x: x * (-x.square()).cumsum(1).exp(),
        lambda x: torch.fft.fft(x, dim=1).real,
        lambda x: x.softmax(1) * x.flip(1),
    ],
    ids=["some tokens", "decays without chunks", "fourier", "flip"],
)
def test_what_is_no_recurrence_is_exact(mix: Callable[[Tensor], Tensor]) -> None:
    report = verify(mix, PLAN)
    assert report.ok, str(report)
