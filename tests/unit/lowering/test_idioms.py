"""Ways of writing a model: each computes what it computes on one device, or is refused by code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fixtures.compare import CLEARLY_WRONG, compare_grads, value_distance
from tests.fixtures.idioms import IDIOMS, Block, Idiom
from tests.fixtures.on_ranks import assert_exact, assert_refused, one_device

EXACT = [i for i in IDIOMS if i.refused is None]
REFUSED = [i for i in IDIOMS if i.refused is not None]


def test_an_operation_on_each_half_alone_would_be_seen() -> None:
    right = next(i for i in EXACT if i.name == "cumsum")
    halves = replace(
        right,
        build=lambda: Block(lambda x: torch.cat([part.cumsum(1) for part in x.chunk(2, 1)], 1)),
    )
    want, got = one_device(right), one_device(halves)
    assert value_distance(want.leaves[0], got.leaves[0]) > CLEARLY_WRONG
    assert compare_grads(want.gradients, got.gradients)[0] > CLEARLY_WRONG


@pytest.mark.parametrize("idiom", EXACT, ids=lambda idiom: idiom.name)
def test_outputs_and_every_gradient_are_those_of_one_device(idiom: Idiom) -> None:
    assert_exact(idiom)


@pytest.mark.parametrize("idiom", REFUSED, ids=lambda idiom: idiom.name)
def test_what_cannot_be_exact_is_refused_by_code(idiom: Idiom) -> None:
    assert_refused(idiom)
