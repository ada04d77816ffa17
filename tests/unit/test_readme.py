"""What the README and the pages of docs/ print can be done as printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

import seqcomp
from seqcomp.diagnostics import CODES
from seqcomp.plan.resolve import resolve
from seqcomp.strategies.base import AttentionShape, total_bytes
from seqcomp.strategies.compose import layer_steps

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
PAGES = "\n".join((README, *DOCS.values()))


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in fences if name == language]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Python with `command`, in a folder that holds the README's files under their names."""
    (folder / "usp.yaml").write_text(blocks("yaml")[0])
    (folder / "train.py").write_text(blocks("python")[0])
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip


SHOWN = re.findall(
    r"^```sh\n\.venv/bin/seqcomp (.*)\n```\n(?:.*\n){1,4}?```text\n((?:.*\n)*?)```$",
    PAGES,
    re.MULTILINE,
)
PLANNING = next(text for text in blocks("sh") if "seqcomp search" in text).splitlines()


@pytest.mark.parametrize(("command", "printed"), SHOWN)
def test_the_command_line_prints_what_the_readme_shows(
    tmp_path: Path, command: str, printed: str
) -> None:
    done = run(tmp_path, "-m", "seqcomp", *shlex.split(command))
    assert without_errors(done.stdout + done.stderr) == without_errors(printed)
    assert done.returncode == int("error" in printed)


def without_errors(text: str) -> str:
    """Rounding differs between machines; that it is rounding does not."""
    assert not re.search(r"e-0[1-6]|e\+0[1-9]", text), text
    return re.sub(r"\d\.\d\de[-+]\d\d.*", "#", text)


def test_a_run_is_planned_as_the_readme_says(tmp_path: Path) -> None:
    for line in PLANNING:
        done = run(tmp_path, "-m", "seqcomp", *shlex.split(line.removeprefix(".venv/bin/seqcomp ")))
        assert done.returncode == 0, (line, done.stderr)
    assert seqcomp.load_plan(tmp_path / "best.yaml").outputs == {"logits": "drop"}
    assert "<html" in (tmp_path / "best.html").read_text(encoding="utf-8")


def test_all_uses_of_the_command_line_are_tested() -> None:
    assert len(SHOWN) + len(PLANNING) == PAGES.count(".venv/bin/seqcomp ") >= 6


def test_commands_in_the_text_exist() -> None:
    for command in re.findall(r"\bseqcomp (\w+) ", PAGES):
        assert (ROOT / "seqcomp" / "cli" / f"{command}.py").is_file(), command


def test_links_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    for folder, page in ((ROOT, README), *((ROOT / "docs", text) for text in DOCS.values())):
        for link in re.findall(r"\]\(([^)]+)\)", page):
            path, _, anchor = link.partition("#")
            assert (folder / path).exists() if path else anchor in anchors, link
    assert all(f"docs/{name}" in README for name in DOCS)


@pytest.mark.distributed
def test_the_python_example_runs_and_has_the_loss_of_one_process(tmp_path: Path) -> None:
    launch = next(text for text in blocks("sh") if "train.py" in text)
    command = launch.removeprefix(".venv/bin/torchrun ").split()
    ranks = run(tmp_path, "-m", "torch.distributed.run", "--standalone", *command)
    assert ranks.returncode == 0, ranks.stderr
    losses = re.findall(r"loss (\d+\.\d{6})", ranks.stdout)  # ranks may share a line
    assert len(losses) == 4
    assert len(set(losses)) == 1

    lines = blocks("python")[0].splitlines()
    plain = "\n".join(line for line in lines if "dist" not in line and "seqcomp" not in line)
    alone = run(tmp_path, "-c", plain)
    assert alone.returncode == 0, alone.stderr
    assert float(alone.stdout.split()[1]) == pytest.approx(float(losses[0]), abs=1e-5)


LAUNCHES = {
    path.name: path.read_text().replace("\\\n#", "") for path in (ROOT / "plans").glob("*.yaml")
} | {"README.md": next(text for text in blocks("sh") if "--plan" in text)}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launch_lines_fit_the_plan_and_the_example(name: str) -> None:
    line = re.search(r"torchrun (.*) examples/train_text\.py (.*)$", LAUNCHES[name], re.MULTILINE)
    assert line is not None
    launcher, options = line[1].split(), line[2].split()
    assert options[0] == "--plan"
    assert len(options) == 2
    assert name in ("README.md", Path(options[1]).name)
    counts = [
        int(launcher[i + 1])
        for i, o in enumerate(launcher)
        if o in ("--nnodes", "--nproc-per-node")
    ]
    plan = seqcomp.validate(ROOT / options[1], world_size=prod(counts))
    assert [d.code for d in plan if d.code == "SC104"] == []


def test_the_options_of_the_example_are_those_it_has(tmp_path: Path) -> None:
    done = run(tmp_path, str(ROOT / "examples" / "train_text.py"), "--help")
    named = re.search(r"^Its options: `(.*)`\.$", README, re.MULTILINE)
    assert named is not None
    usage = done.stdout.partition("\n\n")[0]
    assert re.findall(r"--[\w-]+", usage) == named[1].split()


def test_every_code_exists() -> None:
    assert set(re.findall(r"\bSC\d{3}\b", PAGES)) <= set(CODES)


def test_the_formula_gives_the_bytes_of_the_demo() -> None:
    """Its model: 3 layers, 8 query and 4 KV heads of 32, fp32, one sequence of 4096."""
    shape = AttentionShape(1, 4096, 8, 4, 32, element_bytes=4)
    steps = layer_steps(resolve(seqcomp.load_plan("usp_2x2")), shape)
    sent = re.findall(
        r"^\| (?:bytes a rank sent|the same by).*\| ([\d,]+) \|$", README, re.MULTILINE
    )
    assert sent == [f"{3 * total_bytes(steps):,}"] * 2


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
    used = set(re.findall(r"seqcomp\.(\w+)\(", PAGES))
    assert used
    assert used <= set(seqcomp.__all__)


def test_folders_named_in_the_readme_exist() -> None:
    folders = re.findall(r"(\w+)/ {2,}", blocks("")[0])
    assert len(folders) >= 8
    for folder in folders:
        assert (ROOT / "seqcomp" / folder).is_dir(), folder
