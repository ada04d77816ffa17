"""The example of a whole job: a rank is killed, the launcher restarts it, SIGTERM ends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seqcomp.training.state import about_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.distributed
def test_it_resumes_after_a_kill_and_saves_when_asked_to_stop(tmp_path: Path) -> None:
    job = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--max-restarts", "1", "examples/pretrain.py", "--folder", str(tmp_path / "job"),
         "--steps", "100000", "--save-every", "2", "--kill-rank", "1", "--kill-step", "6"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=(tmp_path / "errors").open("w"),
    )  # fmt: skip
    lines: list[str] = []
    try:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line.strip())
            if lines[-1].startswith("step    8"):
                job.send_signal(signal.SIGTERM)
        job.wait(timeout=60)
    finally:
        job.kill()
    errors = (tmp_path / "errors").read_text()
    assert re.search(r"RankLostError: rank 1 .* has ended", errors), errors
    assert lines[0] == "starts anew"
    resumed = [line for line in lines if line.startswith("goes on after step")]
    # The save after step 4 may still have been under way.
    assert resumed in (["goes on after step 2"], ["goes on after step 4"]), errors
    losses: dict[str, set[str]] = {}
    for step, loss in re.findall(r"^step +(\d+) +loss (\S+)$", "\n".join(lines), re.MULTILINE):
        losses.setdefault(step, set()).add(loss)
    assert {step: len(found) for step, found in losses.items() if len(found) > 1} == {}
    assert float(min(losses["8"])) < float(min(losses["1"]))
    stopped = re.fullmatch(r"asked to stop: saved after step (\d+)", lines[-1])
    assert stopped is not None, lines
    last = max((tmp_path / "job").iterdir())
    assert last.name == f"step-{int(stopped[1]):08}"
    about = about_of(last)
    assert about["step"] == int(stopped[1])
    assert set(about["stateful"]) == {"sampler", "schedule"}
