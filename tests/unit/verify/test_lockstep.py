"""Ranks as threads: many ranks, failures, inputs."""

from __future__ import annotations

import pytest
import torch

import seqcomp
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.lockstep import reported, train_once
from tests.fixtures.models import M0, Spec, build, inputs


def test_ring_4_ulysses_8() -> None:
    """32 ranks: every gradient on every rank, in fp64."""
    spec = Spec(heads=8, kv_heads=2, head_dim=8, hidden=64)
    outcomes = train_once(plans.usp(4, 8, "zigzag"), spec, batch=1, seq=128)
    assert len(outcomes) == 32
    for rank, outcome in enumerate(outcomes):
        assert outcome.loss <= 1, rank
        assert outcome.gradient <= 1, (rank, outcome.worst)
        assert reported(outcome.report) == outcome.traffic
    assert {row.layout for row in outcomes[0].report.kernels} == {"zigzag"}


def test_a_wrong_model_is_far_off() -> None:
    """Positive control: other weights than the reference's are beyond the tolerance."""

    def step(model, context, local):
        return float(model(**local)["loss"].detach())

    ours = lockstep(lambda: build(Spec(seed=1)), "ring_2", step, inputs=inputs())
    assert abs(ours[0] - float(build()(**inputs())["loss"].detach())) > 1e-3


def test_data_ranks_get_their_slice() -> None:
    def step(model, context, local):
        return context.coords, local["input_ids"], local["flag"]

    batch = {**inputs(batch=4), "flag": 3}
    found = lockstep(build, plans.with_data(plans.ring(2), 2), step, inputs=batch)
    for coords, ids, flag in found:
        assert torch.equal(ids, batch["input_ids"].chunk(2)[coords["data"]])
        assert flag == 3


def test_a_failure_of_one_rank_ends_all() -> None:
    def step(model, context, local):
        if context.rank == 1:
            raise KeyError("rank 1 only")
        model(**local)

    with pytest.raises(KeyError, match="rank 1 only"):
        lockstep(build, plans.usp(2, 2), step, inputs=inputs(), timeout=20)


def test_illegal_plans_are_refused() -> None:
    with pytest.raises(seqcomp.PlanError) as caught:
        lockstep(
            build,
            {
                **plans.ring(2),
                "overrides": [{"match": "nowhere", "ring": {"transport": "p2p"}}],
            },
            lambda *_: None,
        )
    assert "nowhere" in str(caught.value)


def test_the_module_is_given_back() -> None:
    models = []

    def make():
        models.append(build(M0))
        return models[-1]

    def step(model, context, local):
        return model(**local)["loss"].detach()

    lockstep(make, "ring_2", step, inputs=inputs())
    for model in models:
        with pytest.raises(seqcomp.PlanError):
            seqcomp.of(model)
        assert "forward" not in vars(model)


def test_the_package_is_the_public_function_too() -> None:
    import seqcomp.verify.lockstep

    assert callable(seqcomp.verify)
    with pytest.raises(seqcomp.PlanError):
        seqcomp.verify(build, "ring_", inputs_fn=inputs)
