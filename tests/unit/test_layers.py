"""The import rules, the size of files, and that nothing names the machine it was written on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.check_layers import violations

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400


def test_imports_only_point_upwards() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("plan/a.py", "import torch\n", "above the torch line"),
        ("layout/a.py", "def f():\n    from torch import nn\n", "above the torch line"),
        ("layout/a.py", "from ..runtime import dist\n", "layout imports runtime"),
        ("plan/a.py", "from seqcomp.strategies.ring import x\n", "plan imports strategies"),
        ("runtime/a.py", "from seqcomp.plan.schema import Plan\n", "runtime imports plan"),
        ("capture/a.py", "from ..placement.oracle import ask\n", "capture imports placement"),
        ("lowering/a.py", "from ..verify import gloo\n", "lowering imports verify"),
        ("placement/a.py", "from seqcomp import parallelize\n", "public name"),
        ("cli/a.py", "import torch\n", "at module level"),
        ("cli/a.py", "from ..capture import export\n", "at module level"),
        ("colors/a.py", "", "no place in LAYERS"),
    ],
)
def test_a_broken_rule_is_seen(tmp_path: Path, path: str, text: str, message: str) -> None:
    file = tmp_path / "seqcomp" / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    found = violations(tmp_path)
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("runtime/attention/ring.py", "import torch\nfrom ...layout import intervals\n"),
        ("lowering/a.py", "from ..runtime import collectives\nfrom . import passes\n"),
        ("cli/a.py", "def main():\n    import torch\n    from ..capture import export\n"),
        ("__init__.py", "def f():\n    from .cli import main\n"),
    ],
)
def test_what_the_rules_allow(tmp_path: Path, path: str, text: str) -> None:
    file = tmp_path / "seqcomp" / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert violations(tmp_path) == []


def test_files_stay_small() -> None:
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "seqcomp").rglob("*.py")
    }
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}


def test_no_tracked_file_names_a_path_of_a_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    # Joined here, so that this file does not find itself.
    needles = [str(ROOT) + "/", "/" + "home/", "/" + "root/", "/" + "work/", "/" + "Users/"]
    hits = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        hits += [f"{name}: {needle}" for needle in needles if needle in text]
    assert hits == []


def test_checking_a_plan_imports_no_torch() -> None:
    code = (
        "import sys, seqcomp\n"
        "seqcomp.validate('usp_2x2', world_size=4, seq_len=64)\n"
        "seqcomp.load_plan('data_2+ring_2')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
