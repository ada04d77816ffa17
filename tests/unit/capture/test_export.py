"""Captures: sizes that stay symbolic, sizes that the model fixes, and what a capture accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.sizes import BATCH_SYMBOL, LENGTH_SYMBOL
from seqcomp.diagnostics import PlanError
from tests.unit.capture.captured import Calls, capture_of, run

B, S, D = 3, 8, 4


def test_batch_and_length_are_symbols() -> None:
    module = Calls(lambda m, x: x.transpose(1, 2).reshape(x.shape[0], -1))
    capture = capture_of(module, torch.randn(B, S, D))
    assert (capture.batch, capture.length) == (BATCH_SYMBOL, LENGTH_SYMBOL)
    assert capture.hints == {BATCH_SYMBOL: B, LENGTH_SYMBOL: S}
    (leaf,) = capture.graph.output_node().args[0]
    assert capture.shape(leaf) == (BATCH_SYMBOL, 4 * LENGTH_SYMBOL)


@pytest.mark.parametrize(("batch", "length"), [(3, 8), (2, 2), (5, 64), (4, 4)])
def test_one_capture_serves_other_sizes(batch: int, length: int) -> None:
    module = Calls(lambda m, x: x.softmax(1).flatten(0, 1) + torch.arange(D))
    capture = canonicalise(capture_of(module, torch.randn(B, S, D)))
    assert capture.accepts(batch, length)
    x = torch.randn(batch, length, D)
    torch.testing.assert_close(run(capture, module, x), module(x))


def test_the_batch_of_all_data_ranks() -> None:
    capture = capture_of(nn.Identity(), torch.randn(B, S, D), data_degree=4)
    assert capture.hints[BATCH_SYMBOL] == 4 * B
    assert capture.batch == BATCH_SYMBOL


@pytest.mark.parametrize("size", [4, 8])
def test_batch_and_length_of_one_size_are_told_apart(size: int) -> None:
    module = Calls(lambda m, x: x.transpose(0, 1).reshape(x.shape[1], -1))
    capture = capture_of(module, torch.randn(size, size, D))
    (leaf,) = capture.graph.output_node().args[0]
    assert capture.shape(leaf) == (LENGTH_SYMBOL, 4 * BATCH_SYMBOL)
    assert capture.accepts(2, 16)


def test_a_batch_of_one_is_fixed() -> None:
    capture = capture_of(Calls(lambda m, x: x * 2), torch.randn(1, S, D))
    assert capture.batch == 1
    assert capture.accepts(1, 16)
    assert not capture.accepts(2, 16)


def test_a_length_that_the_model_fixes() -> None:
    module = Calls(lambda m, x: x + m.table, table=torch.randn(S, D))
    capture = capture_of(module, torch.randn(B, S, D))
    assert capture.length == S
    assert capture.batch == BATCH_SYMBOL
    assert capture.accepts(5, S)
    assert not capture.accepts(5, S + 1)
    (leaf,) = capture.graph.output_node().args[0]
    assert capture.shape(leaf) == (BATCH_SYMBOL, S, D)


def test_a_length_fixed_by_one_of_two_inputs() -> None:
    class Two(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return input_ids.sum(1) + (labels + torch.arange(S)).sum(1)

    ids = torch.zeros(B, S, dtype=torch.long)
    capture = capture_of(Two(), ids, ids)
    assert capture.length == S
    assert not capture.accepts(B, 2 * S)


@pytest.mark.parametrize("limit", [16, 100])
def test_a_table_bounds_the_length(limit: int) -> None:
    module = Calls(lambda m, x: x + m.table[: x.shape[1]], table=torch.randn(limit, D))
    capture = canonicalise(capture_of(module, torch.randn(B, S, D)))
    assert capture.length == LENGTH_SYMBOL
    assert capture.accepts(B, limit)
    assert not capture.accepts(B, limit + 1)


def test_a_branch_on_the_length_holds_on_its_side_only() -> None:
    def branch(m: Any, x: Tensor) -> Tensor:
        return x * 2 if x.shape[1] > 6 else x * 3

    module = Calls(branch)
    capture = canonicalise(capture_of(module, torch.randn(B, S, D)))
    for length in (2, 6, 7, 30):
        x = torch.randn(B, length, D)
        if capture.accepts(B, length):
            torch.testing.assert_close(run(capture, module, x), module(x))
    assert capture.accepts(B, S)
    assert not capture.accepts(B, 6)


def test_a_divisible_length() -> None:
    module = Calls(lambda m, x: x.view(x.shape[0], -1, 4, D).mean(2))
    capture = canonicalise(capture_of(module, torch.randn(B, S, D)))
    assert capture.accepts(B, 12)
    assert not capture.accepts(B, 10)


def test_sizes_of_one_role_agree() -> None:
    class Two(nn.Module):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return input_ids + position_ids

    capture = capture_of(
        Two(), torch.zeros(B, S, dtype=torch.long), torch.zeros(1, S, dtype=torch.long)
    )
    shapes = [capture.shape(n) for n in capture.graph.nodes if n.op == "placeholder"]
    assert shapes == [(BATCH_SYMBOL, LENGTH_SYMBOL), (1, LENGTH_SYMBOL)]


def test_state_is_named_and_constants_are_kept() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(D, D)
            self.register_buffer("shift", torch.ones(D), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.shift + torch.tensor([1.0, 2.0, 3.0, 4.0])

    module = Stateful()
    capture = capture_of(module, torch.randn(B, S, D))
    assert set(capture.state.values()) >= {"inner.weight", "inner.bias", "shift"}
    assert {capture.state[p] for p in capture.parameters} == {"inner.weight", "inner.bias"}
    assert len(capture.constants) == 1
    x = torch.randn(B, S, D)
    torch.testing.assert_close(run(capture, module, x), module(x))


def test_outputs_keep_their_names_and_structure() -> None:
    module = Calls(lambda m, x: {"logits": x, "aux": (x.sum(), None), "n": 3})
    capture = capture_of(module, torch.randn(B, S, D))
    assert set(capture.output_names) >= {"logits", "aux.0"}
    found = run(capture, module, torch.ones(B, S, D))
    assert found["n"] == 3
    assert found["aux"][1] is None
    assert found["aux"][0] == B * S * D


def test_parameters_on_meta_are_enough() -> None:
    with torch.device("meta"):
        module = nn.Linear(D, D)
    capture = capture_of(module, torch.empty(B, S, D, device="meta"))
    (leaf,) = capture.graph.output_node().args[0]
    assert capture.shape(leaf) == (BATCH_SYMBOL, LENGTH_SYMBOL, D)


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: x * 2 if x.sum() > 0 else x,
        lambda m, x: x[x > 0].sum() if bool(x.any()) else x,
        lambda m, x: [x] * int(x[0, 0, 0].item()),
    ],
)
def test_branches_on_values_are_refused_with_the_cause(body: Any) -> None:
    with pytest.raises(PlanError) as caught:
        canonicalise(capture_of(Calls(body), torch.randn(B, S, D)))
    assert {d.code for d in caught.value.diagnostics} <= {"SC301", "SC311"}


def test_errors_of_the_model_itself_are_told() -> None:
    with pytest.raises(PlanError, match="SC301"):
        capture_of(Calls(lambda m, x: x @ torch.ones(D + 1)), torch.randn(B, S, D))
