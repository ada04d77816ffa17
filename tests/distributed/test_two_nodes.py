"""Jobs on two machines: network namespaces with a slow link, each with a torchrun of its own."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.namespaces import Machine, two_machines, why_not
from seqcomp.runtime.lost import has_ended

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "possible"),
]

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def launched(
    machines: tuple[Machine, Machine], ranks: int, *script: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Both machines' torchrun; ended, with what they started, at the end."""
    running = [
        subprocess.Popen(
            machine.torchrun(number, machines[0], ranks, *script),
            cwd=ROOT, env=machine.environment() | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number, machine in enumerate(machines)
    ]  # fmt: skip
    try:
        yield running
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.communicate(timeout=30)


def test_the_demo_on_two_machines(tmp_path: Path) -> None:
    """Ring across the link, ulysses inside: losses, gradients and bytes as on one machine."""
    script = (
        "examples/train_text.py", "--plan", "plans/usp_2x2.yaml", "--steps", "2", "--layers", "1",
        "--seq-len", "128", "--out", str(tmp_path / "loss.png"),
    )  # fmt: skip
    with two_machines(mbit=100) as machines, launched(machines, 2, *script) as running:
        found = [process.communicate(timeout=200) for process in running]
    assert [process.returncode for process in running] == [0, 0], found
    printed = found[0][0]
    losses = re.findall(r"^step +\d+ +loss one process (\S+) +4 ranks (\S+) ", printed, re.M)
    assert len(losses) == 2
    for alone, ranks in losses:
        assert abs(float(alone) - float(ranks)) < 1e-4
    error = re.search(r"all parameters and ranks: (\S+)$", printed, re.M)
    assert error is not None
    assert float(error[1]) < 1e-5
    rows = re.findall(r"^ +(attention, \w+|gradients) .* (\S+) +(\S+) *$", printed, re.M)
    assert rows
    for purpose, counted, formula in rows:
        assert counted == formula, purpose


def test_a_link_that_goes_down_ends_both_sides_and_is_named(tmp_path: Path) -> None:
    """No connection is closed: each side just hears nothing from the other any more."""
    begun = tmp_path / "begun"
    with (
        two_machines() as machines,
        launched(machines, 1, "tests/fixtures/link_rank.py", str(begun)) as running,
    ):
        limit = time.monotonic() + 120
        while not begun.exists():
            assert time.monotonic() < limit, "the job did not begin"
            assert all(process.poll() is None for process in running), running
            time.sleep(0.1)
        machines[1].unplug()
        start = time.monotonic()
        ended = ranks_of(running)
        while not all(map(has_ended, ended)):
            assert time.monotonic() - start < 30, "a rank hangs"
            time.sleep(0.1)
        took = time.monotonic() - start
        for process in running:
            process.terminate()
        here, there = (process.communicate(timeout=60)[1] for process in running)
    assert took < 15
    assert re.search(rf"rank 1 \(process \d+ of {machines[1].space}\) has given no sign", here)
    assert re.search(r"rank 0 .*(does not answer|no sign of life)", there)


def ranks_of(launchers: list[subprocess.Popen[str]]) -> list[int]:
    """Process ids of the ranks that the launchers have started."""
    parents = {process.pid for process in launchers}
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = [pid for pid in pids if parent_of(pid) in parents]
    assert len(found) == len(launchers)
    return found


def parent_of(pid: int) -> int | None:
    try:
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
