"""The measure itself: it must see what the other tests rely on it to see."""

from __future__ import annotations

import pytest
import torch

from tests.fixtures.compare import compare_grads, reference, value_distance
from tests.fixtures.models import M0, M0_BI, M0_MHA, Spec, build, inputs
from tests.fixtures.parity import data_slice


@pytest.mark.parametrize("spec", [M0, M0_MHA, M0_BI])
def test_the_reference_models_are_what_they_say(spec: Spec) -> None:
    model = build(spec)
    count = sum(p.numel() for p in model.parameters())
    assert count == (26_848 if spec == M0_MHA else 24_800)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert all(not torch.equal(p, torch.ones_like(p)) for p in model.parameters())
    again = build(spec).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_every_parameter_gets_a_gradient_that_matters() -> None:
    want = reference(build, inputs())
    for name in want.gradients:
        without = {k: torch.zeros_like(g) if k == name else g for k, g in want.gradients.items()}
        assert compare_grads(want.gradients, without)[1] == name
        assert compare_grads(want.gradients, without)[0] > 1e6


def test_attention_is_far_from_uniform() -> None:
    """Else a wrong mask or a wrong position would hide."""
    model = build()
    batch = inputs(with_labels=False)
    swapped = {"input_ids": batch["input_ids"].clone()}
    swapped["input_ids"][:, [2, 3]] = batch["input_ids"][:, [3, 2]]
    moved = value_distance(model(**batch)["logits"][:, 8:], model(**swapped)["logits"][:, 8:])
    assert moved > 1e7


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0, 1 + 1e-6])
def test_a_factor_is_seen(factor: float) -> None:
    gradients = {"a": torch.ones(3, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    wrong = {**gradients, "b": gradients["b"] * factor}
    assert compare_grads(gradients, gradients) == (0.0, "")
    worst, where = compare_grads(gradients, wrong)
    assert worst > 50
    assert where == "b"


def test_missing_shapes_and_nan_are_infinitely_wrong() -> None:
    one = torch.ones(2, dtype=torch.float64)
    nan = torch.full((2,), float("nan"), dtype=torch.float64)
    assert compare_grads({"a": one}, {"a": None})[0] == float("inf")
    assert compare_grads({"a": None}, {"a": one})[0] == float("inf")
    assert compare_grads({"a": one}, {"b": one})[0] == float("inf")
    assert compare_grads({"a": one}, {"a": nan})[0] == float("inf")
    assert compare_grads({"a": one}, {"a": one[:1]})[0] == float("inf")
    assert compare_grads({"a": nan}, {"a": nan})[0] == 0.0
    assert value_distance(one, None) == float("inf")


def test_data_ranks_follow_the_order_of_the_mesh() -> None:
    outer = {"mesh": {"data": 2, "ring": 2}}
    inner = {"mesh": {"ring": 2, "data": 2}}
    assert [data_slice(outer, rank) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [data_slice(inner, rank) for rank in range(4)] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert data_slice({"mesh": {"ring": 4}}, 3) == (0, 1)
