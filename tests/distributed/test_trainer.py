"""``transformers.Trainer`` under plans, on the CPU, beside its own run on one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        not (find_spec("accelerate") and find_spec("peft")),
        reason="accelerate or peft is not installed: seqcomp[trainer]",
    ),
]
ROOT = Path(__file__).resolve().parents[2]


def launch(folder: Path, what: str, *command: str) -> None:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, "tests/distributed/trainer_ranks.py", str(folder), what],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def losses(seen: dict[str, Any]) -> dict[int, tuple[float, float]]:
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in seen["log"] if "loss" in row}


def test_training_is_what_the_trainer_does_alone(tmp_path: Path) -> None:
    launch(tmp_path, "alone")
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    launch(tmp_path, "plans", *ranks)
    names = sorted(file.stem for file in tmp_path.glob("*.*.json"))
    assert names == [
        "adam.fsdp", "adam.megatron", "best.fsdp", "bf16.megatron", "full.data", "full.mean",
        "full.own", "full.resumed", "full.ring", "lora.fsdp", "lora.ulysses",
    ]  # fmt: skip
    for name in names:
        want, seen = (
            json.loads((tmp_path / f"{n}.json").read_text()) for n in (name.partition(".")[0], name)
        )
        wanted, found = losses(want), losses(seen)
        assert len(wanted) == 4
        assert wanted[4][0] < wanted[1][0] - 0.1, "nothing was learned"
        assert found.keys() == wanted.keys(), name
        low = name.startswith("bf16")
        for step, values in found.items():
            norm = 2e-3 if low else 2e-4
            assert values == pytest.approx(wanted[step], rel=norm, abs=1e-5), (name, step)
            near = 2e-4 if low else 5e-6
            assert values[0] == pytest.approx(wanted[step][0], rel=near), (name, step)
        # The Trainer evaluates means over batches, of one rank where the loss is not the model's.
        near = 1e-4 if name == "full.own" else 1e-6
        if "eval" in seen:
            assert seen["eval"] == pytest.approx(want["eval"], rel=near), name

        weights = torch.load(tmp_path / f"{name.partition('.')[0]}.pt")
        trained = torch.load(tmp_path / f"{name}.pt")
        assert trained.keys() == weights.keys()
        for key, value in weights.items():
            near = 1e-2 if low else 1e-5
            assert (trained[key] - value).abs().max() <= near * value.abs().max() + 1e-7, key
    last, best = (torch.load(tmp_path / f"{name}.pt") for name in ("adam", "best"))
    assert any((best[key] - value).abs().max() > 1e-3 for key, value in last.items())
    # What is saved is whole, wherever the parameters lived.
    saved = load_file(tmp_path / "adam.fsdp.saved" / "model.safetensors")
    wanted = load_file(tmp_path / "adam.saved" / "model.safetensors")
    assert saved.keys() == wanted.keys()
    assert all(torch.allclose(saved[key], wanted[key], atol=1e-5) for key in wanted)
    # An optimizer's file is one process's, whatever the plan was.
    files = [
        torch.load(tmp_path / name / "checkpoint-2" / "optimizer.pt", weights_only=True)
        for name in ("adam.fsdp", "lora.ulysses")
    ]
    for file in files:
        numbers = [n for group in file["param_groups"] for n in group["params"]]
        assert sorted(file["state"]) == sorted(numbers)
        assert all(type(x) is torch.Tensor for own in file["state"].values() for x in own.values())
