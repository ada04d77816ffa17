"""Every refusal of a bad input says what was found, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from seqcomp.cli.options import whole
from seqcomp.diagnostics import PlanError
from seqcomp.hardware.load import load_cluster
from seqcomp.integrations.models import build_model
from seqcomp.plan.load import load_plan


def written(folder: Path, text: str) -> Path:
    path = folder / "usp.yaml"
    path.write_text(text)
    return path


CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tab": (lambda at: load_plan(written(at, "mesh:\n\tring: 2\n")), "spaces"),
    "bracket": (lambda at: load_plan(written(at, "mesh: {ring: 2\na: b\n")), "close every bracket"),
    "empty": (lambda at: load_plan(written(at, "")), "mesh: {ring: 4}"),
    "folder": (load_plan, "preset"),
    "near": (lambda at: (written(at, ""), load_plan(at / "ups.yaml")), "did you mean"),
    "cluster": (lambda at: load_cluster(written(at, "mesh: {}\n")), "seqcomp bench"),
    "config": (lambda at: build_model("hf:none/config.json"), "config.json"),
    "factory": (lambda at: build_model("python:json:nothing"), "PYTHONPATH"),
}


@pytest.mark.parametrize("case", CASES)
def test_refusals_say_what_to_write(case: str, tmp_path: Path) -> None:
    fails, fix = CASES[case]
    with pytest.raises(PlanError) as caught:
        fails(tmp_path)
    for item in caught.value.diagnostics:
        assert item.found
        assert fix in (item.help or "")


@pytest.mark.parametrize("text", ["-5", "0", "1e6", "128k", "", "9" * 30])
def test_numbers(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"found: .*allowed: whole numbers from 1 to"):
        whole(text)
    assert whole("131_072") == whole(131072) == 131072


@pytest.mark.parametrize(
    "words",
    [
        "estimate ring_8 --model llama3-8b --cluster h100",
        "search --model llama3-8b --cluster h100 --gpus 8",
        "explain ring_8 --model titan:llama3/debugmodel",
    ],
)
def test_documents_that_do_not_fill_a_sequence_are_wrong_usage(words: str, run: Any) -> None:
    code, _, err = run(*words.split(), "--seq-len", "8192", "--documents", "4096,100")
    assert (code, "fix: 4096,100,3996" in err) == (2, True)
