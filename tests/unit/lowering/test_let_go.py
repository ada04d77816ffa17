"""A compiled model and its ranks are forgotten with the last one that uses them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import nn

from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.again import with_memory
from tests.fixtures.models import Spec, build, inputs

USP = plans.usp(2, 2, "zigzag")
PLANS = [
    USP,
    plans.megatron(2),
    with_memory(plans.ring(2), checkpoint="selective", loss_chunks=2),
]


@pytest.fixture(scope="module", autouse=True)
def exports() -> None:
    """Each model is exported anew."""


@pytest.mark.parametrize(
    ("plan", "traced"),
    [*((plan, False) for plan in PLANS), (USP, True)],
    ids=lambda x: plans.name(x) if isinstance(x, dict) else "traced" if x else "",
)
def test_nothing_keeps_a_model_or_its_ranks(plan: plans.Plan, traced: bool) -> None:
    left: list[weakref.ref[Any]] = []

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> None:
        if traced and context.rank == 0:
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        model(**local)["loss"].backward()
        left.extend((weakref.ref(model), weakref.ref(context)))

    lockstep(lambda: build(Spec(vocab=96)), plan, step, inputs=inputs())
    gc.collect()
    assert len(left) >= 4
    assert [found() for found in left if found() is not None] == []
