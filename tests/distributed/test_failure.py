"""What ends a job, and how: killed ranks, SIGTERM, values that are not finite; nothing leaks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import seqcomp
from seqcomp.runtime.lost import STORE_GONE, Lost
from seqcomp.training.failure import EXIT_CODE, StopRequest, Watch
from seqcomp.training.nonfinite import NonFiniteError, NonFiniteWatch
from seqcomp.training.state import Checkpoints
from tests.fixtures import jobs, plans
from tests.fixtures.models import inputs
from tests.fixtures.pool import Pools
from tests.fixtures.steady import count

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(
    r"rank (\d+) .*(has ended|no sign of life|does not answer); this rank was in \w+"
)


@pytest.mark.distributed
def test_survivors_name_the_killed_rank_and_the_job_ends_as_without_kills() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.killing", "--times", "3",
         "--how", "timer", "save", "hang"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False, timeout=240,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *kills, end = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kills) == 3
    for kill in kills:
        victim, survivor = str(kill["victim"]), str(1 - kill["victim"])
        assert kill["codes"][victim] == -signal.SIGKILL, kill
        assert kill["codes"][survivor] == (EXIT_CODE if kill["how"] == "hang" else 1), kill
        assert kill["seconds"] < 15, kill
        named = NAMED.search(kill["errors"][survivor])
        assert named is not None, kill
        assert named[1] == victim, kill
    assert end == {"same": True}


def long_run(
    rank: int, world: int, folder: Path, steps: int
) -> tuple[dict[str, int], dict[str, int]]:
    """What there is after a fifth of the steps, and after all of them; then what is left."""
    before = count()
    seen = []
    with Watch():
        pass
    with Watch():
        model = jobs.make_model(plans.ring(world, "zigzag"))
        job, checkpoints = jobs.make_job(model), Checkpoints(folder, keep=2)

        def after(step: int) -> None:
            if step % 5 == 0:
                checkpoints.save(job, step, background=step % 10 == 0)
            if step in (steps // 5, steps):
                checkpoints.wait()
                seen.append(count())

        jobs.train(job, 0, steps, after)
        assert len(checkpoints.complete()) == 2
        stop(rank, job, folder / "stop")
        not_finite(rank, model)
        checkpoints.close()
        seqcomp.of(model).close()
    assert count()["groups"] == before["groups"]
    first, last = seen
    return first, last


def stop(rank: int, job: Any, folder: Path) -> None:
    """SIGTERM to rank 1 ends all ranks after the same step; the resumed job ends as without it."""
    again = jobs.forget(job.model)
    jobs.train(again, 0, 5)
    want = jobs.digest(jobs.outcome(again))

    again = jobs.forget(job.model)
    checkpoints, stopped = Checkpoints(folder), []
    with StopRequest(seqcomp.of(job.model).context.host) as request:
        for step in range(1, 6):
            jobs.train(again, step - 1, step)
            if step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if request.agreed():
                checkpoints.save(again, step)
                stopped.append(step)
                break
    assert stopped == [3]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    again = jobs.forget(job.model)
    assert checkpoints.resume(again) == 3
    jobs.train(again, 3, 5)
    assert jobs.digest(jobs.outcome(again)) == want
    checkpoints.close()


def not_finite(rank: int, model: Any) -> None:
    """A weight of rank 1 alone is infinite; all ranks say so."""
    with NonFiniteWatch(model) as watch:
        model(**inputs(jobs.SPEC))["loss"].backward()
        watch.check(1)
        with torch.no_grad():
            model.layers[0].mlp.up.weight[0, 0] = float("inf") if rank == 1 else 0
        model(**inputs(jobs.SPEC))["loss"].backward()
        with pytest.raises(NonFiniteError) as caught:
            watch.check(2)
    assert "step 2: not finite, rank 1: the output of layers.0.mlp" in str(caught.value)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.distributed
def test_fifty_steps_leave_nothing_behind(pools: Pools, tmp_path: Path) -> None:
    for first, last in pools.run(2, long_run, tmp_path, 50):
        assert first == last


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x).sqrt()  # finite at 0, its slope is not


def test_the_first_gradient_that_is_not_finite_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), Root())
    with NonFiniteWatch(model) as watch:
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(
            NonFiniteError, match=r"step 0: .*rank 0: the gradient of the output of 1"
        ):
            watch.check(0)
        watch.check(1)


class Answers:
    """A store that is silent now and then; the watch ends with the answers."""

    def __init__(self, watch: Watch, *answers: Lost | None) -> None:
        self._watch, self._answers = watch, list(answers)

    def start(self, *_: object) -> None: ...

    join = start

    def lost(self, silence_s: float) -> Lost | None:
        answer = self._answers.pop(0)
        if not self._answers:
            self._watch._done.set()
        return answer


@pytest.mark.parametrize(
    ("answers", "ends"),
    [((None, STORE_GONE, None, None), False), ((None, STORE_GONE, STORE_GONE, None), True)],
)
def test_a_rank_that_was_held_up_itself_goes_on(
    answers: tuple[Lost | None, ...], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that asks stands still with the process: silence alone is no loss."""

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    watch = Watch(beat_s=0.0, grace_s=0.0)
    asking: Any = Answers(watch, *answers)
    with pytest.raises(SystemExit) if ends else contextlib.nullcontext():
        watch._look(asking, threading.get_ident())


def test_a_request_in_one_process_and_the_handler_before_it() -> None:
    with StopRequest(None) as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
