"""What the README prints can be done as printed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import seqcomp

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in fences if name == language]


def test_the_first_plan_is_legal_and_says_what_its_preset_says(tmp_path: Path) -> None:
    plan = tmp_path / "usp.yaml"
    plan.write_text(blocks("yaml")[0])
    found = seqcomp.validate(plan, world_size=4, seq_len=4096)
    assert [d for d in found if d.severity == "error"] == []
    assert dict(seqcomp.load_plan(plan).mesh) == dict(seqcomp.load_plan("usp_2x2").mesh)


@pytest.mark.parametrize("target", ["demo", "test", "check", "setup"])
def test_make_targets_exist(target: str) -> None:
    """Dry runs: a target that is missing, or a makefile that does not parse, fails."""
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_make_command_in_the_readme_has_a_target() -> None:
    named = set(re.findall(r"^make (\w+)", "\n".join(blocks("sh")), flags=re.MULTILINE))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_ci_runs_what_the_readme_prints() -> None:
    assert "make test" in "\n".join(blocks("sh"))
    assert re.search(r"^exec make test\b", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)


def test_python_in_the_readme_uses_public_names() -> None:
    used = set(re.findall(r"seqcomp\.(\w+)\(", README))
    assert used
    assert used <= set(seqcomp.__all__)


def test_folders_named_in_the_readme_exist() -> None:
    folders = re.findall(r"(\w+)/ {2,}", blocks("")[0])
    assert len(folders) >= 8
    for folder in folders:
        assert (ROOT / "seqcomp" / folder).is_dir(), folder
