"""The public names, and validate as a function."""

import pytest

import seqcomp

NAMES = {
    "Diagnostic", "Plan", "PlanError", "explain", "load_plan", "of", "parallelize", "validate",
    "verify",
}  # fmt: skip


def test_public_names() -> None:
    assert set(seqcomp.__all__) == NAMES
    assert NAMES | {"__version__"} == set(dir(seqcomp))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = seqcomp.nonsense


@pytest.mark.parametrize("value", [0, -1, True, "8", 2.0])
def test_validate_never_raises_for_bad_counts(value: object) -> None:
    found = seqcomp.validate("ring_2", world_size=value, seq_len=value)  # type: ignore[arg-type]
    assert [item.code for item in found] == ["SC010", "SC010"]


@pytest.mark.parametrize("model", [3, object(), "nonsense", "hf:", "titan:x", "python:a"])
def test_validate_never_raises_for_bad_models(model: object) -> None:
    found = seqcomp.validate("ring_2", model)  # type: ignore[arg-type]
    assert [item.code for item in found] == ["SC020" if isinstance(model, str) else "SC022"]


def test_validate_collects_errors_of_text_mesh_and_model() -> None:
    text = "mesh: {ring: 4}\nstrategies: {ring: {layout: zag}}\n"
    found = seqcomp.validate(text, "bad", world_size=3, seq_len=5)
    assert [item.code for item in found] == ["SC009", "SC020", "SC104", "SC206"]
    assert found[0].where == "<plan>:2:29 strategies.ring.layout"
    assert found[2].where == "<plan>:1:1 mesh"
