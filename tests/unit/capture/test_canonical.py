"""Canonical graphs compute what the module computes, or the module is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqcomp.capture.edit import op_name
from seqcomp.diagnostics import PlanError
from tests.unit.capture.canonical import B, Body, D, S, canonical, check
from tests.unit.capture.captured import Calls, ops_of


class Scaled(nn.Module):
    """Regions without gradient around some of the work."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, D))

    def forward(self, x: Tensor) -> Any:
        if self.kind == "no_grad":
            with torch.no_grad():
                frozen = x * self.weight
            return frozen * x * self.weight
        if self.kind == "several":
            with torch.no_grad():
                low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
                steps = (x > low).sum(-1)
            return (x - low) / (high - low + 1) * self.weight, steps
        if self.kind == "nested":
            with torch.no_grad():
                frozen = x * self.weight
                with torch.enable_grad():
                    live = x.sin() * self.weight
            return frozen * live
        if self.kind == "around":
            with torch.set_grad_enabled(False):
                frozen = (x @ x.mT).softmax(-1)
            return frozen @ (x * self.weight)
        assert self.kind == "detach"
        return x.detach() * x * self.weight


@pytest.mark.parametrize("kind", ["no_grad", "several", "around", "detach"])
def test_gradients_stop_where_they_stop(kind: str) -> None:
    capture = check(Scaled(kind))
    assert "wrap_with_set_grad_enabled" not in ops_of(capture)


def test_a_region_with_gradient_inside_of_one_without_is_exact_or_refused() -> None:
    try:
        check(Scaled("nested"))
    except PlanError:
        return


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: x.to(x.dtype) + 1,
        lambda m, x: x[:, :, :] + 1,
        lambda m, x: x[:, : x.shape[1]].expand(-1, -1, -1) + 1,
        lambda m, x: F.dropout(x, 0.5, training=False) + 1,
        lambda m, x: F.dropout(x, 0.0, training=True) + 1,
        lambda m, x: F.dropout(x + 1, 0.5, training=False, inplace=True),
        lambda m, x: F.dropout1d(x, 0.5, training=False) + 1,
    ],
)
def test_identities_go(body: Body) -> None:
    assert [op for op in ops_of(check(Calls(body))) if op != "aten.sym_size"] == ["aten.add"]


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: x[:, :-1] + 1,
        lambda m, x: x.to(torch.float64) + 1,
        lambda m, x: x[:, :1].expand(-1, x.shape[1], -1) + 1,
        lambda m, x: x[1:, :, :] + 1,
    ],
)
def test_what_changes_something_stays(body: Body) -> None:
    kept = [op for op in ops_of(check(Calls(body))) if op not in ("aten.sym_size", "aten.add")]
    assert kept


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (lambda m, x: x + torch.rand_like(x), "SC308"),
        (lambda m, x: x + torch.randn(x.shape[-1]), "SC308"),
        (lambda m, x: torch.bernoulli(x.sigmoid()), "SC308"),
        (lambda m, x: F.alpha_dropout(x, 0.1, training=True), "SC308"),
        (lambda m, x: x[:, torch.randperm(D)[0]], "SC308"),
        (lambda m, x: F.gumbel_softmax(x), "SC307|SC308"),
        (lambda m, x: (x * 0).normal_() + x, "SC307|SC308"),
    ],
)
def test_random_numbers_are_refused_by_code(body: Body, code: str) -> None:
    with pytest.raises(PlanError) as caught:
        canonical(Calls(body), torch.randn(B, S, D))
    assert {d.code for d in caught.value.diagnostics} <= set(code.split("|"))


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: F.dropout(x, 0.1),
        lambda m, x: F.dropout(x + 1, 0.1, inplace=True),
        lambda m, x: F.dropout(F.dropout1d(x, 0.1), 0.2) + F.dropout(x, 0.0),
    ],
)
def test_dropout_becomes_a_function_of_keys(body: Body) -> None:
    """Each with a number of its own, in the order of the calls."""
    capture = canonical(Calls(body), torch.randn(B, S, D))
    found = [n for n in capture.graph.nodes if op_name(n) == "keyed_dropout"]
    assert [n.args[2] for n in found] == list(range(capture.dropouts))
    assert capture.dropouts == len(found) > 0
    assert all(n.args[1].name == capture.dropout_keys for n in found)
    assert not any(op_name(n).startswith("aten.dropout") for n in capture.graph.nodes)


def test_an_input_that_is_dropped_in_place_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        canonical(Calls(lambda m, x: F.dropout(x, 0.1, inplace=True)), torch.randn(B, S, D))
    assert caught.value.diagnostics[0].code == "SC307"


def test_attention_without_dropout_is_not_random() -> None:
    body = lambda m, x: F.scaled_dot_product_attention(x, x, x)  # noqa: E731
    canonical(Calls(body), torch.randn(B, S, D))


class Counts(nn.Module):
    """Keeps state in a buffer."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.register_buffer("seen", torch.zeros(D))
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "add_":
            self.seen.add_(x.detach().sum((0, 1)))
        elif self.kind == "assigned":
            self.seen = self.seen + x.detach().sum((0, 1))
        elif self.kind == "batch norm":
            return self.norm(x.mT)
        elif self.kind == "slice":
            self.seen[:2] = x.detach()[0, 0, :2]
        return x * self.seen


@pytest.mark.parametrize("kind", ["add_", "assigned", "batch norm", "slice"])
def test_state_that_changes_is_refused(kind: str) -> None:
    with pytest.raises(PlanError) as caught:
        canonical(Counts(kind).train(), torch.randn(B, S, D))
    assert {d.code for d in caught.value.diagnostics} <= {"SC307", "SC301"}


def test_batch_norm_in_eval_mode_only_reads() -> None:
    module = Counts("batch norm").eval()
    check(module)


def test_assertions_become_facts() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        torch._check(x.shape[1] % 3 == 0)
        return x.view(x.shape[0], -1, 3, D).sum(2)

    capture = canonical(Calls(body), torch.randn(B, S, D))
    assert not [op for op in ops_of(capture) if "assert" in op]
    assert capture.accepts(B, 9)
    assert not capture.accepts(B, 8)


def test_values_that_decide_sizes_are_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return x[:, :, : int((x > 0).any().item()) + 1]

    with pytest.raises(PlanError):
        canonical(Calls(body), torch.randn(B, S, D))
