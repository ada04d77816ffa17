"""torchtitan's own Trainer under plans, on the CPU, beside its own run on one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.families import needs_torchtitan

pytestmark = [pytest.mark.distributed, needs_torchtitan]

ROOT = Path(__file__).resolve().parents[2]


def launch(ranks: int, folder: Path, what: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(ranks), "tests/distributed/titan_ranks.py", str(folder), what,
        ],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def read(folder: Path, name: str) -> dict[str, tuple[float, float]]:
    logged: dict[str, tuple[float, float]] = json.loads((folder / f"{name}.json").read_text())
    return logged


def test_the_trainer_logs_what_one_process_logs(tmp_path: Path) -> None:
    launch(1, tmp_path, "alone")
    launch(2, tmp_path, "plans")
    wanted = read(tmp_path, "alone")
    assert list(wanted) == ["1", "2", "3"]
    assert wanted["3"][0] < wanted["1"][0]
    for name, steps in (("ring", "123"), ("data", "123"), ("fsdp", "23")):
        found = read(tmp_path, name)
        assert "".join(found) == steps, name  # fsdp went on from the ring's checkpoint
        for step, (loss, norm) in found.items():
            assert loss == pytest.approx(wanted[step][0], rel=2e-6), (name, step)
            # Equal gradients, but torch sums the squares of sharded ones less exactly.
            assert norm == pytest.approx(wanted[step][1], rel=2e-4), (name, step)
