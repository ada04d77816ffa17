"""Every rule is sound: local operations on placed operands give the global result and gradient."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from seqcomp.capture.export import Capture
from seqcomp.capture.sizes import LENGTH_SYMBOL
from seqcomp.placement import assign
from seqcomp.placement.spec import Spec
from seqcomp.runtime.threads import run_ranks
from tests.unit.placement.forced import (
    DATA_RING,
    PADDED_RING,
    PADDED_USP,
    SPECIAL_RULES_WITH_FORCE,
    USP,
    Case,
    Mesh,
    Outcome,
    cases_of,
    cut,
    input_spec,
    run_rank,
)
from tests.unit.placement.idioms import (
    SHAPES,
    Expected,
    Idioms,
    capture_idioms,
    eager,
)
from tests.unit.placement.idioms_of_shapes import LOSSES, PRODUCTS, SHAPING
from tests.unit.placement.idioms_of_tokens import MIXING, POINTWISE, REDUCTIONS, VIEWS

# Their captures are of one length: all idioms of a table share a capture.
FIXING = ("chunk tokens", "take_along_dim")
TABLES = {
    "pointwise": POINTWISE,
    "views": VIEWS,
    "mixing": MIXING,
    "reductions": REDUCTIONS,
    "products": PRODUCTS,
    "shaping": {name: f for name, f in SHAPING.items() if name not in FIXING},
    "fixing": {name: SHAPING[name] for name in FIXING},
    "losses": LOSSES,
}
MESHES = {
    "data x ring": DATA_RING,
    "usp": USP,
    "padded ring": PADDED_RING,
    "padded usp": PADDED_USP,
}


@functools.cache
def on_one_device(table: str) -> tuple[Capture, Expected]:
    """The idioms captured and computed once, for all meshes."""
    return capture_idioms(TABLES[table]), eager(TABLES[table])


@functools.cache
def problems(table: str, mesh_name: str) -> tuple[dict[str, list[str]], list[str]]:
    """Per idiom the combinations that went wrong; and all that were run: others are refused."""
    mesh, idioms = MESHES[mesh_name], TABLES[table]
    capture, expected = on_one_device(table)
    found: dict[str, list[str]] = {name: [] for name in idioms}
    cases: list[Case] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assign, "SPECIAL_RULES", SPECIAL_RULES_WITH_FORCE)
        for name in idioms:
            cases += cases_of(capture, name, mesh, on_error=found[name].append)
    module = Idioms(idioms)
    values = {name: v for name, (v, _) in expected.items()}
    ranks = run_ranks(
        lambda context: run_rank(context, cases, capture, mesh, module, values), mesh.sizes, 30.0
    )
    places = list(itertools.product(*(range(n) for n in mesh.sizes.values())))
    specs = [input_spec(capture, name, mesh) for name in SHAPES]
    for number, case in enumerate(cases):
        name = case.name.partition("[")[0]
        for rank, outcomes in enumerate(ranks):
            place = dict(zip(mesh.sizes, places[rank], strict=True))
            found[name] += [
                f"{case.name} rank {rank}: {text}"
                for text in differences(outcomes[number], case, expected[name], specs, mesh, place)
            ]
    return found, [case.name for case in cases]


@pytest.mark.parametrize("table", ["reductions", "products", "losses"])
def test_padding_refuses_nothing_that_adds_up_over_tokens(table: str) -> None:
    assert problems(table, "padded usp")[1] == problems(table, "usp")[1]


def differences(
    outcome: Outcome,
    case: Case,
    expected: tuple[list[Tensor], list[Tensor | None]],
    inputs: list[Spec],
    mesh: Mesh,
    place: dict[str, int],
) -> Iterator[str]:
    """What one rank has and should not have."""
    if outcome.error:
        yield outcome.error
        return
    values, gradients = expected
    for value, spec, own in zip(values, case.outputs, outcome.values, strict=True):
        want = cut(value, spec, mesh.sizes, place)
        if want.dtype != own.dtype:
            yield f"dtype {own.dtype} instead of {want.dtype}"
        yield from differs("result", own, want)
    specs: list[Spec | None] = [*inputs, *[None] * (len(gradients) - len(inputs))]
    for index, (value, spec, own) in enumerate(
        zip(gradients, specs, outcome.gradients, strict=True)
    ):
        if value is None:
            if own is not None and bool(own.any()):
                yield f"gradient {index} out of nothing"
            continue
        want = cut(value, spec, mesh.sizes, place) if spec is not None else value
        found = torch.zeros_like(want) if own is None else own
        yield from differs(f"gradient {index}", found, want)


def differs(what: str, own: Tensor, want: Tensor) -> Iterator[str]:
    if own.shape != want.shape:
        yield f"{what}: shape {tuple(own.shape)} instead of {tuple(want.shape)}"
    elif own.dtype in (torch.float32, torch.bfloat16):
        if not torch.allclose(own, want, rtol=1e-5, atol=1e-5):
            yield f"{what} differs"
    elif not torch.allclose(own.double(), want.double(), rtol=1e-9, atol=1e-9, equal_nan=True):
        yield f"{what} differs by {(own.double() - want.double()).abs().max():.2e}"


CASES = [
    (table, name, mesh)
    for table, idioms in TABLES.items()
    for name in idioms
    for mesh in MESHES
    if not (table == "fixing" and MESHES[mesh].view.pads)  # refused: see test_case_05_length.py
]


@pytest.mark.parametrize(("table", "name", "mesh"), CASES)
def test_local_operations_give_the_global_result(table: str, name: str, mesh: str) -> None:
    if MESHES[mesh].view.pads:
        assert on_one_device(table)[0].length == LENGTH_SYMBOL
    assert problems(table, mesh)[0][name] == []
