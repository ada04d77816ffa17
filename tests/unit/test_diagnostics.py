"""The catalogue of codes, diagnostics and PlanError."""

import json
import pickle
import re
from pathlib import Path

import pytest

from seqcomp.diagnostics import CODES, Diagnostic, PlanError, diagnostic, raise_for_errors

SOURCES = Path(__file__).parents[2] / "seqcomp"


def test_codes_are_documented_and_well_formed() -> None:
    for code, info in CODES.items():
        assert info.code == code
        assert re.fullmatch(r"SC[0-5]\d\d|SC9\d\d", code)
        assert info.severity in ("error", "warning", "note")
        assert len(info.title) > 5
        assert info.text.endswith("."), code


def test_codes_are_unique_in_the_table() -> None:
    rows = re.findall(r'^    \("(SC\d{3})",', (SOURCES / "diagnostics/codes.py").read_text(), re.M)
    assert sorted(rows) == sorted(set(rows)) == sorted(CODES)


def test_every_code_in_the_source_is_in_the_catalogue() -> None:
    used = {
        code
        for path in SOURCES.rglob("*.py")
        if path.name != "codes.py"
        for code in re.findall(r"SC\d\d\d", path.read_text(encoding="utf-8"))
    }
    assert used - set(CODES) == set()
    assert len(used) > 40


def test_catalogue_is_immutable() -> None:
    with pytest.raises(TypeError):
        CODES["SC001"] = CODES["SC002"]  # type: ignore[index]


def test_diagnostic_takes_severity_and_text_from_the_catalogue() -> None:
    item = diagnostic("SC207", where="a.yaml:3:4 mesh", found=3, legal=[1, 2], help="use 2")
    assert item.severity == "warning"
    assert item.message == CODES["SC207"].title
    assert item.to_json() == {
        "code": "SC207", "severity": "warning", "message": CODES["SC207"].title,
        "where": "a.yaml:3:4 mesh", "found": 3, "legal": [1, 2], "help": "use 2",
    }  # fmt: skip
    assert str(item).splitlines() == [
        f"warning SC207 at a.yaml:3:4 mesh: {CODES['SC207'].title}",
        "  found: 3",
        "  allowed: 1, 2",
        "  fix: use 2",
    ]


@pytest.mark.parametrize("value", [None, 3, True, "x", [1, ["a"]], float("nan"), object(), {1: 2}])
def test_any_value_found_becomes_json(value: object) -> None:
    item = diagnostic("SC008", found=value, legal=value)
    json.dumps(item.to_json(), allow_nan=False)
    hash(item)


def test_plan_error_lists_everything_and_survives_pickling() -> None:
    items = (diagnostic("SC104", found=24, legal=32), diagnostic("SC101", where="here", found="x"))
    error = PlanError(items)
    assert isinstance(error, ValueError)
    assert error.diagnostics == items
    for part in ("SC104", "24", "32", "SC101", "here"):
        assert part in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.diagnostics == items


def test_only_errors_raise() -> None:
    raise_for_errors([diagnostic("SC207"), diagnostic("SC208")])
    with pytest.raises(PlanError) as caught:
        raise_for_errors([diagnostic("SC207"), diagnostic("SC104")])
    assert [item.code for item in caught.value.diagnostics] == ["SC104"]


def test_diagnostics_are_frozen() -> None:
    item = Diagnostic("SC001", "error", "m")
    with pytest.raises(AttributeError):
        item.code = "SC002"  # type: ignore[misc]
