"""The demo, tiny: started as a user starts it, judged by what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "examples/train_text.py"
TINY = ("--steps", "3", "--layers", "1", "--seq-len", "128")
LOSSES = re.compile(r"^step +\d+ +loss one process (\S+) +4 ranks (\S+) ", re.MULTILINE)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


def test_four_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "loss.png"
    done = run(SCRIPT, *TINY, "--out", str(picture))
    assert done.returncode == 0, done.stderr

    losses = [(float(alone), float(ranks)) for alone, ranks in LOSSES.findall(done.stdout)]
    assert len(losses) == 3
    for alone, ranks in losses:
        assert abs(alone - ranks) < 1e-4
    assert losses[-1][0] < losses[0][0] - 0.1, "nothing was learned"

    error = re.search(r"all parameters and ranks: (\S+)$", done.stdout, re.MULTILINE)
    assert error is not None
    assert float(error[1]) < 1e-5

    rows = re.findall(r"^ +(attention, \w+|gradients) .* (\S+) +(\S+) *$", done.stdout, re.M)
    assert len(rows) == 5
    for purpose, counted, formula in rows:
        assert counted == formula, purpose

    saved = [
        float(x)
        for x in re.findall(r"^ (?:one process|rank \d) .* (\S+) +\S+ *$", done.stdout, re.M)
    ]
    assert len(saved) == 5
    # A quarter, and the output of attention once more: before and after the all-to-all.
    assert all(0.25 * saved[0] - 0.1 <= rank <= 0.3 * saved[0] + 0.1 for rank in saved[1:])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_under_torchrun(tmp_path: Path) -> None:
    done = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        SCRIPT, *TINY, "--plan", "plans/data_2.yaml", "--no-reference",
        "--out", str(tmp_path / "loss.png"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^step +\d+ +loss \S+$", done.stdout, re.MULTILINE)) == 3
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ("mesh: {ring: 3}\nstrategies: {ring: {}}\n", "SC206"),  # found before any rank starts
        ("mesh: {ring: 2}\nstrategies: {ring: {}}\noutputs: {logit: full}\n", "SC111"),  # by ranks
    ],
)
def test_a_bad_plan_ends_with_one_text(tmp_path: Path, plan: str, code: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(plan)
    done = run(SCRIPT, *TINY, "--plan", str(file), "--no-reference")
    assert done.returncode == 1
    assert done.stderr.count(f"error {code} at ") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "step" not in done.stdout
