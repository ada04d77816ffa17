"""What a process keeps of the models that it has compiled or refused."""

from __future__ import annotations

import gc

import pytest
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import seqcomp
from seqcomp.diagnostics import PlanError
from tests.fixtures.models import build, inputs


def kept(known: set[int]) -> list[int]:
    """Operations that each ShapeEnv made since remembers."""
    envs = [x for x in gc.get_objects() if type(x) is ShapeEnv and id(x) not in known]
    return [len(env.fake_tensor_cache) for env in envs]


@pytest.fixture(scope="module", autouse=True)
def exports() -> None:
    """Each capture is made anew."""


@pytest.fixture
def known() -> set[int]:
    gc.collect()
    return {id(x) for x in gc.get_objects() if type(x) is ShapeEnv}


def test_a_capture_is_forgotten(known: set[int]) -> None:
    """torch keeps the ShapeEnv of each export for good: what hangs on it must not grow."""
    model = seqcomp.parallelize(build(), plan={"mesh": {"ring": 1}, "strategies": {"ring": {}}})
    model(**inputs())["loss"].backward()
    assert kept(known) == [0]


def test_so_is_one_of_a_refused_call(known: set[int]) -> None:
    with pytest.raises(PlanError, match="SC201"):
        seqcomp.explain(build(), "ulysses_3", seq_len=24)
    assert kept(known) == [0]
