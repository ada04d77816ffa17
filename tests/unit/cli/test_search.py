"""`seqcomp search`: what it prints and writes, exit codes, and that it needs no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from seqcomp.plan.load import load_plan

M0 = "python:tests.fixtures.models:build"
LLAMA = ("--model", "llama3-8b", "--cluster", "h100", "--seq-len", "131072")


def test_the_plan_that_it_writes_is_what_validate_accepts(run, tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    code, out, err = run("search", *LLAMA, "--gpus", "16", "--out", str(path))
    assert (code, err) == (0, f"written to {path}\n")
    for part in ("fastest of each set of degrees", "one decision changed", "second would change"):
        assert part in out
    for note in ("SC421", "SC422"):
        assert note in out
    plan = load_plan(path)
    assert plan.outputs == {"logits": "drop"}
    assert path.read_text().startswith("# Found by seqcomp search for llama3-8b on 16 GPUs")
    checked = ("validate", str(path), "--world", "16", "--seq-len", "131072")
    assert run(*checked, "--model", "llama3-8b")[0] == 0
    assert run("validate", str(path), "--world", "8", "--model", "llama3-8b")[0] == 1


def test_json(run) -> None:
    code, out, err = run("search", *LLAMA, "--gpus", "8", "--mode", "prefill", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["mode"] == "prefill"
    assert found["plan"] == found["ranked"][0]["plan"] == load_plan(found["plan"]).to_dict()
    assert "memory" not in found["plan"], "a prefill has no checkpoints"
    steps = [item["estimate"]["step_seconds"] for item in found["ranked"]]
    assert steps == sorted(steps)
    assert {reason["decision"] for reason in found["reasons"]} >= {"fsdp"}
    assert found["runner_up"]["terms"][0]["what"] == "step"


def test_a_model_of_ones_own(run, tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    args = ("--model", M0, "--cluster", "l20", "--seq-len", "4096", "--gpus", "4")
    code, _, err = run("search", *args, "--out", str(path))
    assert (code, err) == (0, f"written to {path}\n")
    assert load_plan(path).memory.loss_chunks == 1, "nobody has said that it has a loss to cut"
    assert run("validate", str(path), "--model", M0, "--world", "4", "--seq-len", "4096")[0] == 0


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (("--cluster", "h1000"), 2, "SC027"),
        (("--model", "llama3-9b"), 2, "SC020"),
        (("--gpus", "5000"), 1, "SC120"),
        (("--model", "llama3-405b", "--gpus", "8"), 1, "SC122"),
        (("--gpus", "8", "--out", "/nowhere/at/all.yaml"), 2, "SC031"),
    ],
)
def test_refusals(run, change: tuple[str, ...], code: int, text: str) -> None:
    given, out, err = run("search", *LLAMA, *change)
    assert (given, out) == (code, "")
    assert text in err
    assert "fix:" in err or "allowed:" in err
    assert "Traceback" not in err


def test_known_models_need_no_torch() -> None:
    code = (
        "import sys\nfrom seqcomp.cli import main\n"
        "try: main(['search', *sys.argv[1:], '--gpus', '8'])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *LLAMA], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0
