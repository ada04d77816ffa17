"""Model families, unmodified: loss, logits and every gradient of every rank equal one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

import seqcomp
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures.compare import (
    CLEARLY_WRONG,
    Reference,
    compare_grads,
    distance,
    field_of,
    reference,
    value_distance,
)
from tests.fixtures.families import (
    FAMILIES,
    TIED,
    build_family,
    family_inputs,
    tolerance_of,
)
from tests.fixtures.lockstep import whole_gradients

ALONE = ("ring_2", "ulysses_2", "megatron_sp_2")
COMPOSED = ("usp_2x2", "ring_2+megatron_sp_2")
# One of each kind: separate, Conv1D, fused, interleaved, parallel with the MLP, nn.Module's own.
SAMPLE = ("llama", "gpt2", "phi3", "gpt_neox", "cohere", "encoder")
CASES = [(family, plan) for family in FAMILIES for plan in ALONE] + [
    (family, plan) for family in SAMPLE for plan in COMPOSED
]


@pytest.fixture(scope="module")
def one_process() -> dict[str, Reference]:
    """The reference of each family, made once."""
    return {
        family: reference(lambda f=family: build_family(f), family_inputs()) for family in FAMILIES
    }


@pytest.mark.parametrize(("family", "plan"), CASES)
def test_parity(one_process: dict[str, Reference], family: str, plan: str) -> None:
    want, tolerance = one_process[family], tolerance_of(family)

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        out = model(**local)
        loss = field_of(out, "loss")
        assert loss is not None
        loss.backward()
        return (
            value_distance(want.loss, loss, tolerance),
            value_distance(want.logits, field_of(out, "logits"), tolerance),
            compare_grads(want.gradients, whole_gradients(model, context), tolerance),
            isinstance(out, dict if family == "encoder" else ModelOutput),
            len(seqcomp.of(model).programs[-1].cuts),
        )

    ranks = lockstep(lambda: build_family(family), plan, step, inputs=family_inputs())
    for rank, (loss, logits, (gradient, worst), same_type, cuts) in enumerate(ranks):
        assert loss <= 1, rank
        assert logits <= 1, rank
        assert gradient <= 1, (rank, worst)
        assert same_type
        assert (cuts > 0) == ("megatron" in plan)


def test_tied_weights_are_tied() -> None:
    for family in FAMILIES:
        model = build_family(family)
        names = len(list(model.named_parameters(remove_duplicate=False)))
        assert (names > len(list(model.parameters()))) == (family in TIED), family


def test_a_shifted_position_is_noticed(one_process: dict[str, Reference]) -> None:
    """Positive control: rotary positions that start at 1 on the second half of the sequence."""
    batch = family_inputs()
    positions = torch.arange(batch["input_ids"].shape[1])
    positions = positions + (positions >= len(positions) // 2)
    shifted = reference(
        lambda: build_family("llama"), {**batch, "position_ids": positions.expand(2, -1)}
    )
    assert distance(one_process["llama"], shifted, tolerance_of("llama")) > CLEARLY_WRONG
