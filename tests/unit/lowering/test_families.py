"""Model families, unmodified: loss, logits and every gradient of every rank equal one process."""

from __future__ import annotations

import functools
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
from tests.fixtures.exports import exported_once
from tests.fixtures.families import (
    FAMILIES,
    TIED,
    TITAN,
    build_family,
    family_inputs,
    needs_torchtitan,
    tolerance_of,
)
from tests.fixtures.lockstep import whole_gradients
from tests.fixtures.parity import data_slice, slice_batch

ALONE = ("ring_2", "ulysses_2", "megatron_sp_2")
COMPOSED = ("usp_2x2", "ring_2+megatron_sp_2")
# One of each kind: separate, Conv1D, fused, interleaved, parallel with the MLP, nn.Module's own.
SAMPLE = ("llama", "gpt2", "phi3", "gpt_neox", "cohere", "encoder", *TITAN)
# Heads of torchtitan's debug models allow 4.
FOUR = [(family, "megatron_sp_4") for family in TITAN] + [(f, "data_2+ring_2") for f in TITAN]
OTHERS = [family for family in FAMILIES if family not in SAMPLE]
CASES = [
    (family, plan)
    for index, family in enumerate(SAMPLE)
    for plan in (ALONE[index % len(ALONE)], *COMPOSED)
] + [
    # What is like one of the sample: the tensor axis, and ring and ulysses in turn.
    (family, plan)
    for index, family in enumerate(OTHERS)
    for plan in ("megatron_sp_2", ALONE[index % 2])
]


def _marked(family: str, *rest: str) -> Any:
    return pytest.param(family, *rest, marks=[needs_torchtitan] if family in TITAN else [])


@functools.cache
def one_process(family: str) -> Reference:
    """The reference of a family, made once."""
    return reference(lambda: build_family(family), family_inputs())


@pytest.mark.parametrize(("family", "plan"), [_marked(*case) for case in CASES + FOUR])
def test_parity(family: str, plan: str) -> None:
    want, tolerance = one_process(family), tolerance_of(family)

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        out = model(**local)
        loss = field_of(out, "loss")
        assert loss is not None
        loss.backward()
        part, parts = data_slice(plan, context.rank)
        logits = slice_batch(want.logits, part, parts)
        return (
            value_distance(want.loss, loss, tolerance),
            value_distance(logits, field_of(out, "logits"), tolerance),
            compare_grads(want.gradients, whole_gradients(model, context), tolerance),
            isinstance(out, dict if family in ("encoder", *TITAN) else ModelOutput),
            len(seqcomp.of(model).programs[-1].cuts),
        )

    with exported_once(family):
        ranks = lockstep(lambda: build_family(family), plan, step, inputs=family_inputs())
    for rank, (loss, logits, (gradient, worst), same_type, cuts) in enumerate(ranks):
        assert loss <= 1, rank
        assert logits <= 1, rank
        assert gradient <= 1, (rank, worst)
        assert same_type
        assert (cuts > 0) == ("megatron" in plan)


@pytest.mark.parametrize("family", [_marked(family) for family in FAMILIES])
def test_tied_weights_are_tied(family: str) -> None:
    model = build_family(family)
    names = len(list(model.named_parameters(remove_duplicate=False)))
    assert (names > len(list(model.parameters()))) == (family in TIED)


def test_a_shifted_position_is_noticed() -> None:
    """Positive control: rotary positions that start at 1 on the second half of the sequence."""
    batch = family_inputs()
    positions = torch.arange(batch["input_ids"].shape[1])
    positions = positions + (positions >= len(positions) // 2)
    shifted = reference(
        lambda: build_family("llama"), {**batch, "position_ids": positions.expand(2, -1)}
    )
    assert distance(one_process("llama"), shifted, tolerance_of("llama")) > CLEARLY_WRONG
