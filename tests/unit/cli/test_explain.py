"""`seqcomp explain`: exit codes, streams and JSON."""

import functools
import json

import pytest

import seqcomp
from tests.fixtures.models import build

M0 = "python:tests.fixtures.models:build"


@pytest.fixture
def run(run):
    return functools.partial(run, "explain")


def test_text(run) -> None:
    code, out, err = run("usp_4x4", "--model", M0, "--seq-len", "64", "--dtype", "bf16")
    assert (code, err) == (0, "")
    assert out.startswith("usp_4x4: program Decoder on ring 4 x ulysses 4; batch 1, length 64;")
    for part in ("all_to_all", "p2p", "zigzag", "optimizer state", "balance max / mean"):
        assert part in out


def test_json(run) -> None:
    args = ("ring_8+data_2", "--model", M0, "--seq-len", "64", "--batch", "2")
    code, out, err = run(*args, "--json")
    assert (code, err) == (0, "")
    same = seqcomp.explain(build(), "ring_8+data_2", seq_len=64, batch=2).to_json()
    assert json.loads(out) == same


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("ring_2", "--model", M0, "--seq-len", "15"), 1, "SC206"),
        (("ring_x", "--model", M0, "--seq-len", "16"), 1, "SC012"),
        (("missing.yaml", "--model", M0, "--seq-len", "16"), 1, "SC0"),
        (("ulysses_8", "--model", M0, "--seq-len", "16"), 1, "SC2"),
        (("ring_2", "--model", "nowhere", "--seq-len", "16"), 2, "SC020"),
        (("ring_2", "--model", "python:tests.nowhere:x", "--seq-len", "16"), 1, "SC021"),
        (("ring_2", "--model", M0), 2, "--seq-len"),
        (("ring_2", "--seq-len", "16"), 2, "--model"),
        (("ring_2", "--model", M0, "--seq-len", "0"), 2, "--seq-len"),
        (("ring_2", "--model", M0, "--seq-len", "16", "--dtype", "int3"), 2, "int3"),
    ],
)
def test_what_cannot_be_explained(run, args, code, text) -> None:
    found, out, err = run(*args)
    assert found == code
    assert text in err
    assert out == ""
    assert "Traceback" not in err


def test_refusals_as_json(run) -> None:
    code, out, err = run("ring_2", "--model", M0, "--seq-len", "15", "--json")
    assert code == 1
    assert [item["code"] for item in json.loads(out)["diagnostics"]] == ["SC206"]
    assert "Traceback" not in err
