"""`seqcomp verify`: exit codes, streams and JSON."""

import json

import pytest

from seqcomp.lowering import ops

M0 = "python:tests.fixtures.models:build"


def test_equal_plans_exit_0(run) -> None:
    code, out, err = run("verify", "data_2+ring_2", "--model", M0, "--seq-len", "16")
    assert code == 0, err
    assert "data_2+ring_2: equal to one device (4 ranks, lockstep, fp64)" in out
    assert err == ""


def test_different_ones_exit_1_and_name_the_operation(run, monkeypatch) -> None:
    monkeypatch.setattr(ops.AllReduce, "bind", lambda self, rank: lambda x: x.clone())
    code, out, _ = run(
        "verify", "ring_2", "--model", M0, "--seq-len", "16", "--batch", "1", "--json"
    )
    assert code == 1
    found = json.loads(out)
    assert found["ok"] is False
    assert found["first_divergence"]["phase"] == "forward"
    assert found["first_divergence"]["relative"] > 1e-3
    assert found["problems"]


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("ring_2", "--model", M0, "--seq-len", "15"), 1, "SC206"),
        (("ring_x", "--model", M0, "--seq-len", "16"), 1, "SC012"),
        (("ring_2", "--model", "nowhere", "--seq-len", "16"), 2, "SC020"),
        (("ring_2", "--model", "hf:LlamaForCausalLM", "--seq-len", "16"), 2, "SC026"),
        (("ring_2", "--model", M0), 2, "--seq-len"),
    ],
)
def test_what_cannot_be_verified(run, args, code, text) -> None:
    found, out, err = run("verify", *args)
    assert found == code
    assert text in err
    assert out == ""
    assert "Traceback" not in err
