"""Mistakes of users on real ranks: the same PlanError everywhere, and nothing hangs or aborts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.fixtures import plans
from tests.fixtures.models import M0, Decoder, Spec, build, inputs
from tests.fixtures.parity import Case, check_parity, check_refused
from tests.fixtures.pool import Pools


class Branching(Decoder):
    """Branches on a value: torch.export cannot capture it."""

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:  # type: ignore[override]
        if input_ids.sum().item() > 100:
            return super().forward(input_ids, labels)
        return super().forward(input_ids.flip(1), labels)


def build_branching(spec: Spec) -> nn.Module:
    torch.manual_seed(0)
    return Branching(spec).double()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("plan", "code", "words"),
    [
        (plans.ring(4), "SC104", ("4", "2")),
        ({"mesh": {"ring": 2}, "strategies": {"rign": {}}}, "SC007", ("rign", "ring")),
        ({"mesh": {"ring": 2}, "strategies": {"ring": {"layout": "zag"}}}, "SC009", ("zigzag",)),
        ({"mesh": {"ring": 0, "ulysses": 2}, "strategies": {"ulysses": {}}}, "SC010", ("ring",)),
        ({**plans.ring(2), "memory": {"offload": "cpu"}}, "SC117", ("checkpoint",)),
        (
            {**plans.ring(2), "inputs": {"tokens": {"seq": 1}}},
            "SC111",
            ("tokens", "input_ids"),
        ),
    ],
)
def test_plan(pools: Pools, plan: plans.Plan, code: str, words: tuple[str, ...]) -> None:
    assert code in check_refused(pools, Case(plan, M0, world=2), *words)


@pytest.mark.distributed
def test_illegal_degree_names_what_is_legal(pools: Pools) -> None:
    case = Case(plans.ulysses(4), Spec(heads=6, kv_heads=3))
    codes = check_refused(pools, case, "6", "4")
    assert "SC201" in codes


@pytest.mark.distributed
def test_kv_heads_that_neither_divide_nor_are_divided(pools: Pools) -> None:
    case = Case(plans.ulysses(2), Spec(heads=6, kv_heads=3))
    assert "SC202" in check_refused(pools, case, "3", "2")


@pytest.mark.distributed
def test_a_model_that_cannot_be_captured(pools: Pools) -> None:
    case = Case(plans.ring(2), M0, build=build_branching)
    assert check_refused(pools, case) == ("SC301",)


def differ(rank: int, world: int, how: str) -> tuple[tuple[str, ...], str]:
    """(codes, text): one rank compiles something else, or its model fails alone."""
    import seqcomp

    plan = plans.ring(2, "zigzag")
    model: nn.Module = build()
    if how == "plan" and rank == 1:
        plan = plans.ring(2, "contiguous")
    if how == "failure" and rank == 1:
        model = build_branching(M0)
    if how == "unreadable" and rank == 1:
        plan = {"mesh": {"ring": 2}, "strategies": {"rign": {}}}
    if how == "model" and rank == 1:
        model = build(Spec(layers=1, causal=(True,)))
    try:
        compiled = seqcomp.parallelize(model, plan=plan)
        compiled(**inputs())
    except seqcomp.PlanError as error:
        seen = tuple(d.code for d in error.diagnostics), str(error)
    else:
        seen = (), "no error"
    return seen


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["plan", "failure", "unreadable", "model"])
def test_one_rank_differs(pools: Pools, how: str) -> None:
    seen = pools.run(2, differ, how)
    assert seen[0] == seen[1]
    assert seen[0][0], seen[0][1]
    check_parity(pools, Case(plans.ring(2, "zigzag")))


def call_wrongly(rank: int, world: int, how: str) -> tuple[tuple[str, ...], str]:
    import seqcomp

    model = seqcomp.parallelize(build(), plan=plans.ring(2))
    batch: dict[str, Any] = inputs()
    if how == "missing":
        del batch["input_ids"]
    elif how == "unknown":
        batch["attention_bias"] = torch.zeros(2)
    elif how == "labels":
        batch["labels"] = batch["labels"][:, :8]
    try:
        model(**batch)
    except seqcomp.PlanError as error:
        return tuple(d.code for d in error.diagnostics), str(error)
    return (), "no error"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "word"),
    [("missing", "input_ids"), ("unknown", "attention_bias"), ("labels", "labels")],
)
def test_call(pools: Pools, how: str, word: str) -> None:
    seen = pools.run(2, call_wrongly, how)
    assert seen[0] == seen[1]
    codes, text = seen[0]
    assert codes
    assert word in text


def test_without_process_group() -> None:
    import seqcomp

    with pytest.raises(seqcomp.PlanError) as caught:
        seqcomp.parallelize(build(), plan=plans.ring(2))
    assert [d.code for d in caught.value.diagnostics] == ["SC105"]
