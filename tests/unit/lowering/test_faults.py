"""What a captured graph does not show, and what is done to a model after it was compiled."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.diagnostics import PlanError
from seqcomp.lowering.compiled import compiled_of
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.hidden_effects import HIDDEN, Keyword
from tests.fixtures.idioms import Block, D, Idiom, attend, tokens
from tests.fixtures.on_ranks import assert_exact, assert_refused

PLAN = plans.ring(2, "zigzag")
EXACT = [i for i in HIDDEN if i.refused is None]
REFUSED = [i for i in HIDDEN if i.refused is not None]


@pytest.mark.parametrize("idiom", EXACT, ids=lambda idiom: idiom.name)
def test_outputs_and_every_gradient_are_those_of_one_device(idiom: Idiom) -> None:
    assert_exact(idiom)


@pytest.mark.parametrize("idiom", REFUSED, ids=lambda idiom: idiom.name)
def test_what_the_graph_would_lose_is_refused_by_code(idiom: Idiom) -> None:
    assert_refused(idiom)


class Masked(nn.Module):
    """A causal mask and a table in buffers; one linear; tokens [B, S, D]."""

    causal: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(D, D)
        causal = torch.ones(16, 16, dtype=torch.bool).tril()
        self.register_buffer("causal", causal, persistent=False)
        self.register_buffer("table", torch.linspace(0.1, 1, 16).double()[:, None])

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        x = x * self.table[:n]
        return attend(x, self.mixed(x), x, attn_mask=self.causal[:n, :n])


def cumulated(x: Tensor) -> Tensor:
    return x.cumsum(1).tanh()


def block() -> nn.Module:
    return Block(cumulated)


def fresh(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build().to(torch.float64)


def weighted(out: Tensor) -> Tensor:
    """A loss in which every element counts differently."""
    return (out * torch.arange(out.numel(), dtype=out.dtype).cos().view(out.shape)).sum()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def after_change(
    build: Callable[[], nn.Module], change: Callable[[nn.Module], Any]
) -> tuple[Tensor, list[Tensor | None]]:
    """One device: the change, then a call."""
    model = fresh(build)
    change(model)
    out = model(**tokens())
    weighted(out).backward()
    return out.detach(), gradients(model)


def _replaced_linear(m: Any) -> None:
    m.mixed = nn.Linear(D, D).to(torch.float64)
    draw = torch.Generator().manual_seed(11)  # ranks are threads, and share torch's own
    with torch.no_grad():
        for parameter in m.mixed.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / D)


def _doubled_inputs(m: Any) -> None:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        assert all(isinstance(a, Tensor) for a in args)
        return (args[0] * 2,)

    m.mixed.register_forward_pre_hook(hook)


def _tripled_outputs(m: Any) -> None:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        assert isinstance(out, Tensor)
        assert all(isinstance(a, Tensor) for a in args)
        return out * 3

    m.mixed.register_forward_hook(hook)


def _doubled_gradients(m: Any) -> None:
    def hook(module: nn.Module, given: Any, made: Any) -> tuple[Any, ...]:
        assert all(isinstance(g, Tensor) for g in (*given, *made))
        return tuple(g * 2 for g in given)

    m.mixed.register_full_backward_hook(hook)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "mask_filled": (Masked, lambda m: m.causal.fill_(True)),
    "mask_replaced": (
        Masked,
        lambda m: setattr(m, "causal", torch.ones(16, 16, dtype=torch.bool)),
    ),
    "mask_window": (Masked, lambda m: m.causal.logical_and_(torch.ones_like(m.causal).triu(-2))),
    "table_changed": (Masked, lambda m: m.table.mul_(2)),
    "table_replaced": (Masked, lambda m: setattr(m, "table", m.table * 3)),
    "weight_changed": (Masked, lambda m: m.mixed.weight.data.mul_(2)),
    "weight_replaced": (
        Masked,
        lambda m: setattr(m.mixed, "weight", nn.Parameter(m.mixed.weight.detach() * 2)),
    ),
    "submodule_replaced": (Masked, _replaced_linear),
    "forward_pre_hook": (Masked, _doubled_inputs),
    "forward_hook": (Masked, _tripled_outputs),
    "full_backward_hook": (Masked, _doubled_gradients),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_the_first_call_is_seen(name: str) -> None:
    build, change = CHANGES[name]
    before = fresh(build)(**tokens()).detach()
    want, want_gradients = after_change(build, change)

    def step(model: nn.Module, context: RankContext, _: dict[str, Any]) -> str:
        torch.testing.assert_close(model(**tokens()).detach(), before)
        change(model)
        out = model(**tokens())
        weighted(out).backward()
        torch.testing.assert_close(out.detach(), want)
        torch.testing.assert_close(gradients(model), want_gradients)
        return "exact"

    outcomes = lockstep(lambda: fresh(build), PLAN, step)
    assert set(outcomes) == {"exact"}


class Kept(nn.Module):
    """Keeps a loss in an attribute for the caller, as models with auxiliary losses do."""

    def __init__(self, keep: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.keep = keep
        self.losses: list[Tensor] = []
        self.known: dict[str, Tensor] = {}
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.keep(self, y.pow(2).mean())
        return y


KEPT: dict[str, Callable[[Any, Tensor], Any]] = {
    "attribute": lambda m, loss: setattr(m, "aux", loss),
    "new_attribute": lambda m, loss: setattr(m, "fresh", loss),
    "attribute_of_a_child": lambda m, loss: setattr(m.first, "aux", loss),
    "list": lambda m, loss: m.losses.append(loss),
    "dict": lambda m, loss: m.known.update(loss=loss),
    "tuple_in_an_attribute": lambda m, loss: setattr(m, "aux", (1, {"loss": loss})),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_tensor_kept_for_later_is_refused_and_nothing_is_left_behind(name: str) -> None:
    def step(model: Any, context: RankContext, _: dict[str, Any]) -> list[str]:
        with pytest.raises(PlanError) as caught:
            model(**tokens())
        assert model.aux is None
        assert (model.losses, model.known) == ([], {})
        assert not hasattr(model, "fresh")
        assert not hasattr(model.first, "aux")
        return [d.code for d in caught.value.diagnostics]

    outcomes = lockstep(lambda: fresh(lambda: Kept(KEPT[name])), PLAN, step)
    assert outcomes == [["SC307"]] * 2


def test_positional_arguments_without_a_name() -> None:
    def call(model: nn.Module) -> Tensor:
        x = tokens()["x"]
        return model(x, x * 2, x.exp(), k=3.0, z=x.cos())

    want = call(fresh(Keyword)).detach()

    def step(model: nn.Module, context: RankContext, _: dict[str, Any]) -> None:
        torch.testing.assert_close(call(model).detach(), want)

    lockstep(lambda: fresh(Keyword), PLAN, step)


def _loaded(model: nn.Module) -> nn.Module:
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded: nn.Module = torch.load(stored, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": _loaded,
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("called", [True, False], ids=["called", "not_called"])
def test_a_copy_of_a_compiled_module_is_a_plain_module(name: str, called: bool) -> None:
    plain = fresh(block)
    want = plain(**tokens())
    weighted(want).backward()

    def step(model: nn.Module, context: RankContext, _: dict[str, Any]) -> None:
        if called:
            model(**tokens())
        made = COPIES[name](model)
        assert type(made) is type(model)
        assert compiled_of(made) is None
        assert compiled_of(model) is not None
        assert list(made.state_dict()) == list(plain.state_dict())
        if context.rank == 1:
            return
        # One rank alone: a copy that still communicates would wait for the other.
        out = made(**tokens())
        weighted(out).backward()
        assert torch.equal(out, want)
        assert all(map(torch.equal, gradients(made), gradients(plain)))
        assert all(g is None for g in gradients(model))

    lockstep(lambda: fresh(block), PLAN, step, timeout=10)


class Several(nn.Module):
    """Outputs that carry the sequence; some are whole on every rank in the natural course."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.first(x)
        return {
            "cut": y.tanh(),
            "whole": y.cumsum(1),
            "given": x,
            "sequence_first": y.flip(1).transpose(0, 1),
        }


@pytest.mark.parametrize("layout", plans.LAYOUTS)
@pytest.mark.parametrize("data", [1, 2])
def test_a_sharded_output_is_cut_also_where_it_was_whole(layout: str, data: int) -> None:
    plain = fresh(Several)
    call = tokens(batch=4)
    want = plain(**call)
    sum(weighted(v) for v in want.values()).backward()  # type: ignore[union-attr]
    weights = {k: torch.arange(v.numel(), dtype=v.dtype).cos().view(v.shape)
               for k, v in want.items()}  # fmt: skip
    plan = plans.ring(2, layout) | {"outputs": dict.fromkeys(want, "sharded")}
    if data > 1:
        plan = plans.with_data(plan, data)

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> None:
        x = local["x"].detach().clone().requires_grad_()
        out = model(x)
        index = seqcomp.of(model).token_index()
        loss = torch.zeros((), dtype=torch.float64)
        for name, value in out.items():
            seq, batch = (0, 1) if name == "sequence_first" else (1, 0)
            part = context.coords.get("data", 0)

            def own(t: Tensor, batch: int = batch, seq: int = seq, part: int = part) -> Tensor:
                return t.chunk(data, batch)[part].index_select(seq, index)

            torch.testing.assert_close(value.detach(), own(want[name]).detach())
            gathered = seqcomp.of(model).gather(value.detach(), dim=seq)
            torch.testing.assert_close(gathered, want[name].detach().chunk(data, batch)[part])
            loss = loss + (value * own(weights[name])).sum()
        loss.backward()
        torch.testing.assert_close(gradients(model), gradients(plain))
        torch.testing.assert_close(x.grad, call["x"].grad.chunk(data, 0)[part])

    lockstep(lambda: fresh(Several), plan, step, inputs=call)
