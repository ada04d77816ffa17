"""Case 7: more ranks than KV heads. Exact with copies of KV heads, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqcomp
from seqcomp.runtime import tensor_parallel
from seqcomp.runtime.comm import Communicator, RankContext
from seqcomp.runtime.threads import run_ranks
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import CLEARLY_WRONG
from tests.fixtures.lockstep import train_once
from tests.fixtures.models import Spec, build, inputs

TWO = Spec(hidden=64, heads=8, kv_heads=2)
ONE = Spec(kv_heads=1)
THREE = Spec(hidden=48, heads=6, kv_heads=3)


@pytest.mark.parametrize(
    ("spec", "plan"),
    [
        pytest.param(TWO, plans.ulysses(4), id="a-2-of-8-ulysses-4"),
        pytest.param(TWO, plans.megatron(4), id="b-2-of-8-tensor-4"),
        pytest.param(ONE, plans.ulysses(2), id="c-1-of-4-ulysses-2"),
        pytest.param(ONE, plans.megatron(4), id="c-1-of-4-tensor-4"),
        pytest.param(TWO, plans.with_tensor(plans.ulysses(2), 4), id="ulysses-2-of-tensor-4"),
        pytest.param(THREE, plans.megatron(3), id="d-3-of-6-tensor-3"),
    ],
)
def test_exact(spec: Spec, plan: plans.Plan) -> None:
    """Also the gradients of K and V, summed over the copies."""
    length = 24 if "tensor" in plan["mesh"] and plan["mesh"]["tensor"] == 3 else 16
    for rank, outcome in enumerate(train_once(plan, spec, seq=length)):
        assert outcome.loss <= 1, rank
        assert outcome.logits <= 1, rank
        assert outcome.gradient <= 1, (rank, outcome.worst)


@pytest.mark.parametrize(
    ("spec", "plan", "code", "words", "legal"),
    [
        pytest.param(THREE, plans.ulysses(2), "SC202", ("3 KV heads", "degree 2"), (1, 3, 6),
                     id="d-3-of-6-ulysses-2"),
        pytest.param(Spec(), plans.ulysses(3), "SC201", ("4 query heads", "degree 3"), (1, 2, 4),
                     id="e-4-ulysses-3"),
        pytest.param(THREE, plans.megatron(2), "SC204", ("3 KV heads", "degree 2"), (1, 3, 6),
                     id="d-3-of-6-tensor-2"),
        pytest.param(Spec(mlp=96), plans.megatron(3), "SC203", ("4 query heads", "degree 3"),
                     (1, 2, 4), id="e-4-tensor-3"),
    ],
)  # fmt: skip
def test_refused_by_name(
    spec: Spec, plan: plans.Plan, code: str, words: tuple[str, ...], legal: tuple[int, ...]
) -> None:
    """Before anything runs, with the layer, the heads, the degree and the degrees that fit."""
    with pytest.raises(seqcomp.PlanError) as caught:
        lockstep(lambda: build(spec), plan, lambda model, context, local: model(**local),
                 inputs=inputs(spec, seq=24))  # fmt: skip
    (found,) = [d for d in caught.value.diagnostics if d.severity == "error"]
    assert found.code == code
    assert found.legal == legal
    text = str(found)
    for word in (*words, "layers.0.attn"):
        assert word in text, text


@pytest.mark.parametrize(("heads", "degree"), [(2, 4), (1, 4), (2, 8), (4, 4)])
def test_which_rank_has_which_head(heads: int, degree: int) -> None:
    """Rank r has KV head r // (degree / heads): heads are not tiled but repeated in place."""
    x = torch.arange(heads).double().view(1, heads, 1, 1)

    def own(context: RankContext) -> float:
        return float(tensor_parallel.own_heads(x, heads, context.comm(("tensor",))))

    assert run_ranks(own, {"tensor": degree}) == [r // (degree // heads) for r in range(degree)]


def test_control_tiled_heads_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiled(x: torch.Tensor, heads: int, comm: Communicator) -> torch.Tensor:
        return x.narrow(1, comm.rank % heads, 1)

    monkeypatch.setattr(tensor_parallel, "own_heads", tiled)
    outcomes: list[Any] = train_once(plans.megatron(4), TWO)
    assert all(outcome.loss > CLEARLY_WRONG for outcome in outcomes)
    assert all(outcome.gradient > CLEARLY_WRONG for outcome in outcomes)
