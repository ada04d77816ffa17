"""Checkpoints of a training job: saved under one plan, loaded under any other.

A checkpoint is a folder ``step-00000004`` of torch.distributed.checkpoint with a ``job.json``. It
is written under another name and renamed when all ranks have written their parts, so a folder with
such a name is complete, and whatever fails in between leaves the ones before it as they are.
All ranks make the same calls; they share one file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from seqcomp.runtime.dist import ProcessContext
from seqcomp.training.job import Job, collect, plan_of, restore, tensors_of

_NAME = re.compile(r"step-(\d{8,})")
_ABOUT = "job.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the same on all ranks, and names those it hit."""


class Checkpoints:
    """The checkpoints in a folder, for the ranks of the default process group or one process.

    keep: how many complete ones to leave in the folder; None leaves all.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = None) -> None:
        assert keep is None or keep >= 1, "keep at least one"
        self.folder = Path(folder)
        self._keep = keep
        self._context: ProcessContext | None = None
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self._context = ProcessContext({"world": dist.get_world_size()}, None, None)
            # A save in the background talks while the loop goes on.
            self._group = self._context.side_group("checkpoints")
        self._rank = self._context.rank if self._context else 0
        self._running: Future[None] | None = None

    def complete(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        numbered = [(int(m[1]), path) for path in found if (m := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(numbered)]

    def latest(self) -> Path | None:
        """The newest complete checkpoint, as rank 0 sees it. Collective."""
        found: list[Path] = []
        self._first(lambda: found.extend(self.complete()[-1:]))
        paths = self._gather(str(found[0]) if found else "")
        return Path(paths[0]) if paths[0] else None

    def save(self, job: Job, step: int, *, background: bool = False) -> None:
        """Saves the job after `step` steps. Collective.

        With `background` it returns when everything has been copied; one save is under way at a
        time, and its errors come out of the next `save`, `wait` or `close`.

        Raises CheckpointError where a rank could not write, RankLostError where one has ended.
        """
        self.wait()
        path, partial = self._path(step), self._path(step, ".partial")
        state = collect(job, self._rank)
        about = _about(job, step, state, self._context.world_size if self._context else 1)
        self._first(lambda: shutil.rmtree(partial, ignore_errors=True))
        alone, writer = self._group is None, self._writer(partial)
        with self._errors(f"the save of step {step}", partial):
            if not background:
                save(state, storage_writer=writer, process_group=self._group, no_dist=alone)
                self._first(lambda: self._publish(partial, path, about))
                return
            started = async_save(
                state, storage_writer=writer, process_group=self._group, no_dist=alone
            )
        assert isinstance(started, Future)
        self._running = self._then_publish(started, partial, path, about)

    def wait(self) -> None:
        """Until the save in the background, if there is one, is complete. Collective.

        Raises what `save` raises.
        """
        running, self._running = self._running, None
        if running is None:
            return
        with self._errors("a save in the background"):
            failure = running.exception()
            if isinstance(failure, CheckpointException):
                raise failure
            self._agree(repr(failure) if failure else "")

    def load(self, job: Job, path: Path) -> int:
        """Fills the job from a checkpoint; the number of steps it had made. Collective.

        Random states are those of the same rank, or of rank 0 where the checkpoint has fewer.
        """
        job.optimizer.zero_grad()  # or torch would not make the state that is loaded into
        about = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
        rank = self._rank if self._rank < about["world"] else 0
        state = collect(job, rank)
        alone = self._group is None
        with self._errors(f"the load of {path.name}"):
            load(state, checkpoint_id=path, process_group=self._group, no_dist=alone)
        restore(job, state)
        for name, item in job.stateful.items():
            if name not in about["stateful"]:
                raise CheckpointError(f"{path.name} has no state of {name!r}")
            item.load_state_dict(about["stateful"][name])
        return int(about["step"])

    def resume(self, job: Job) -> int:
        """Loads the newest complete checkpoint; its steps, or 0 where there is none. Collective."""
        path = self.latest()
        return 0 if path is None else self.load(job, path)

    def close(self) -> None:
        """Waits for a save in the background and frees the process group. Collective."""
        try:
            self.wait()
        finally:
            if self._context is not None:
                self._context.close()

    def _path(self, step: int, ending: str = "") -> Path:
        return self.folder / f"step-{step:08}{ending}"

    def _writer(self, path: Path) -> FileSystemWriter:
        return FileSystemWriter(path)

    def _publish(self, partial: Path, path: Path, about: dict[str, Any]) -> None:
        text = json.dumps(about, indent=1)
        with (partial / _ABOUT).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        replaced = path.with_name(f"{path.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if path.exists():  # the job was started anew in the same folder
            path.rename(replaced)
        partial.rename(path)
        _sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        if self._keep is not None:
            for old in self.complete()[: -self._keep]:
                shutil.rmtree(old)

    def _then_publish(
        self, written: Future[Any], partial: Path, path: Path, about: dict[str, Any]
    ) -> Future[None]:
        done: Future[None] = Future()

        def settle(written: Future[Any]) -> None:
            try:
                written.result()
                # The coordinator is done when all ranks are.
                if self._rank == 0:
                    self._publish(partial, path, about)
            except BaseException as error:
                _remove(partial if self._rank == 0 else None)
                done.set_exception(error)
            else:
                done.set_result(None)

        written.add_done_callback(settle)
        return done

    def _first(self, work: Callable[[], object]) -> None:
        """`work` on rank 0; its error on all."""
        failure = ""
        if self._rank == 0:
            try:
                work()
            except OSError as error:
                failure = repr(error)
        self._agree(failure)

    def _agree(self, failure: str) -> None:
        found = {rank: text for rank, text in enumerate(self._gather(failure)) if text}
        if found:
            raise CheckpointError("; ".join(f"rank {r}: {text}" for r, text in found.items()))

    def _gather(self, text: str) -> list[str]:
        if self._context is None:
            return [text]
        texts: list[Any] = [None] * self._context.world_size
        with self._context.census.naming("a checkpoint"):
            dist.all_gather_object(texts, text, group=self._group)
        return texts

    @contextlib.contextmanager
    def _errors(self, doing: str, partial: Path | None = None) -> Any:
        naming = self._context.census.naming(doing) if self._context else contextlib.nullcontext()
        try:
            with naming, warnings.catch_warnings():
                # That there is one process only is known.
                warnings.filterwarnings("ignore", "torch.distributed is")
                yield
        except CheckpointException as error:
            _remove(partial if self._rank == 0 else None)
            found = "; ".join(f"rank {r}: {e[0]!r}" for r, e in sorted(error.failures.items()))
            raise CheckpointError(f"{doing} failed: {found}") from error
        except CheckpointError as error:
            _remove(partial if self._rank == 0 else None)
            raise CheckpointError(f"{doing} failed: {error}") from error


def about_of(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: step, world, plan, and the saved tensors by key."""
    about: dict[str, Any] = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
    return about


def _about(job: Job, step: int, state: dict[str, Any], world: int) -> dict[str, Any]:
    about = {
        "step": step,
        "world": world,
        "plan": plan_of(job.model),
        "stateful": {name: item.state_dict() for name, item in job.stateful.items()},
        "tensors": {k: [str(x.dtype), list(x.shape)] for k, x in tensors_of(state).items()},
    }
    json.dumps(about)  # now, on every rank, not after the parts were written
    return about


def _remove(partial: Path | None) -> None:
    if partial is not None:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Makes a rename in the folder outlast a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
