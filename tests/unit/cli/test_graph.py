"""`seqcomp graph` and the page of `seqcomp explain`: files, streams, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import typer

from seqcomp.cli.dtypes import Dtype, VerifiedDtype, torch_name
from seqcomp.cli.refusal import writable, write

M0 = ("--model", "python:tests.fixtures.models:build", "--seq-len", "64")


def test_a_picture_and_data(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "g.svg"
    code, out, err = run("graph", "ring_2", *M0, "--out", str(file), "--json")
    assert (code, err) == (0, f"written to {file}\n")
    data = json.loads(out)
    assert data["repeats"] == [["layers.0", "layers.1"]]
    root = ET.parse(file).getroot()
    title = root.find("{*}title")
    assert title is not None
    assert title.text == "ring_2, python:tests.fixtures.models:build"
    shown = "".join(root.itertext())
    for region in data["regions"]:
        assert region["label"] in shown
    assert "layers.0 x 2" in shown or "attention x 2" in shown


def test_text_of_a_module(run: Any) -> None:
    code, out, err = run("graph", "ring_2", *M0, "--module", "layers.1.attn")
    assert (code, err) == (0, "")
    assert "attention  attn  sends" in out


def test_refusals(run: Any) -> None:
    short = (*M0[:3], "15")
    code, out, err = run("graph", "ring_2", *short, "--json")
    assert code == 1
    assert [d["code"] for d in json.loads(out)["diagnostics"]] == ["SC206"]
    assert "SC206" in err
    assert run("graph", "ring_2", "--model", "nowhere", "--seq-len", "16")[0] == 2


def test_a_page(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    args = ("explain", "ring_2", *M0, "--dtype", "bfloat16", "--html", str(file))
    code, out, err = run(*args, "--budget", "0.5")
    assert (code, err) == (0, f"written to {file}\n")
    assert out.startswith("ring_2: program Decoder on ring 2")
    page = file.read_text(encoding="utf-8")
    assert "<title>seqcomp: ring_2, python:tests.fixtures.models:build</title>" in page
    assert "within the budget of 512 MiB" in page
    assert ", bfloat16)" in page


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Known before the work, and all the same behind it."""
    lost = str(tmp_path / "no" / "out.html")
    for fails in (lambda: write(lost, "text"), lambda: writable(lost)):
        with pytest.raises(typer.Exit) as caught:
            fails()
        assert caught.value.exit_code == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error SC031 at {lost}: the file cannot be written")
        assert "allowed:" in said
        assert "fix:" in said


def test_both_spellings_of_dtypes() -> None:
    assert {torch_name(d) for d in Dtype} == {"bfloat16", "float16", "float32", "float64"}
    assert torch_name(Dtype.bf16) == torch_name(VerifiedDtype.bfloat16) == "bfloat16"
    assert torch_name(VerifiedDtype.fp64) == "float64"
    assert {d.value for d in VerifiedDtype} < {d.value for d in Dtype}


def test_verify_takes_both(run: Any) -> None:
    code, out, _ = run("verify", "ring_2", *M0[:3], "8", "--dtype", "float32")
    assert (code, "fp32" in out) == (0, True)
