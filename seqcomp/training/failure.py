"""What a training loop does when something ends: another rank, or this one by request.

```python
with Watch(), StopRequest(seqcomp.of(model).context.host) as stop:
    for batch in sampler.feed(loader):
        ...
        if stop.agreed():  # SIGTERM, or whatever called stop.request()
            checkpoints.save(job, step)
            break
```
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from seqcomp.runtime.comm import HostChannel
from seqcomp.runtime.lost import (
    FIND_S,
    STORE_GONE,
    Census,
    Lost,
    RankLostError,
    is_connection_error,
    own_store,
)

__all__ = ["EXIT_CODE", "RankLostError", "StopRequest", "Watch"]

EXIT_CODE = 75
"""Of a process that the watch ended: its main thread hung in a collective with a lost rank."""


class Watch:
    """Inside it no rank outlives another by more than about 15 s, and errors name the lost rank.

    A thread looks after the processes of this host, and after beats of the next rank where that is
    on another. Collectives over gloo fail by themselves when a rank ends, and RankLostError comes
    out of them, or takes the place of a connection's error that leaves the block. A main thread
    that hangs instead (NCCL, a device) gets `grace_s`; then its stack and the lost rank go to
    stderr and the process ends with EXIT_CODE. Any other error that leaves the block is told to the
    other ranks. Does nothing in a job of one process.

    A second thread talks to the store, because a call of it has no end where the store's host has
    vanished without closing its connections.

    silence_s: how long a rank of another host may show no beat; a stopped process is silent too.
    Making one is collective, over the ranks of the default process group.
    """

    def __init__(
        self, *, beat_s: float = 1.0, silence_s: float = 8.0, grace_s: float = 4.0
    ) -> None:
        self._beat_s, self._silence_s, self._grace_s = beat_s, silence_s, grace_s
        self._done = threading.Event()  # of a watch that is entered once
        self._thread: threading.Thread | None = None
        self._census: Census | None = None

    def __enter__(self) -> Watch:
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return self
        rank, ranks = dist.get_rank(), range(dist.get_world_size())
        # A client for each thread: a call of one never waits for one of the other.
        self._census = Census(own_store(), rank, ranks)
        self._census.come_back()
        theirs = Census(own_store(), rank, ranks)
        for census in (self._census, theirs):
            census.wait_for_all()
        main = threading.get_ident()
        asking = _Asking(theirs, _Beats(theirs, self._silence_s / self._beat_s))
        self._thread = threading.Thread(
            target=self._look, args=(asking, main), name="seqcomp-watch", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        census, self._census = self._census, None
        if census is None:
            return
        try:
            if error is None or (isinstance(error, SystemExit) and not error.code):
                census.leave(self._silence_s)
            elif not isinstance(error, RankLostError):
                self._explain(census, error)
        finally:
            self._done.set()
            assert self._thread is not None
            self._thread.join()

    def _explain(self, census: Census, error: BaseException) -> None:
        """The error of a lost rank, or our own told to the others."""
        lost = census.find(FIND_S) if is_connection_error(error) else None
        if lost is not None:
            raise lost.error(f"{type(error).__name__}: {error}") from error
        census.report(census.rank, f"failed with {type(error).__name__}: {str(error)[:500]}")

    def _look(self, asking: _Asking, main: int) -> None:
        asking.start(self._done, self._beat_s)
        while (lost := self._surely_lost(asking)) is None:
            if self._done.wait(self._beat_s):
                asking.join(self._silence_s)
                return
        if self._done.is_set():
            return
        stack = traceback.format_stack(sys._current_frames().get(main))
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{''.join(stack)}{lost.error('the call above')}\n")
            sys.stderr.flush()
        os._exit(EXIT_CODE)

    def _surely_lost(self, asking: _Asking) -> Lost | None:
        """Who is lost, and is so after the grace that the main thread has."""
        if asking.lost(self._silence_s) is None:
            return None
        self._done.wait(self._grace_s)
        # Code that never let go of the interpreter, or a machine without a free core, silences the
        # store as well: then it has answered by now.
        return asking.lost(self._silence_s)


class _Asking:
    """What the store says of the other ranks, asked in a thread of its own."""

    def __init__(self, census: Census, beats: _Beats) -> None:
        self._census, self._beats = census, beats
        self._lost: Lost | None = None
        self._answered = time.monotonic()
        self._thread: threading.Thread | None = None

    def start(self, done: threading.Event, every_s: float) -> None:
        """Asks until `done`, or until a rank is lost."""
        self._thread = threading.Thread(
            target=self._ask, args=(done, every_s), name="seqcomp-watch-store", daemon=True
        )
        self._thread.start()

    def join(self, wait_s: float) -> None:
        """Waits for the thread, but not for a store that is silent."""
        assert self._thread is not None
        self._thread.join(wait_s)

    def lost(self, silence_s: float) -> Lost | None:
        """Who is lost: the store's host where it has not answered for so long."""
        silent = time.monotonic() - self._answered > silence_s
        return self._lost or (STORE_GONE if silent else None)

    def _ask(self, done: threading.Event, every_s: float) -> None:
        while self._lost is None and not done.wait(every_s):
            self._lost = self._beats.next() or self._census.find()
            self._answered = time.monotonic()


class _Beats:
    """This rank's beats, and those of the next one, if that is on another host."""

    def __init__(self, census: Census, most_silent: float) -> None:
        self._census = census
        self._most_silent = most_silent
        following = census.ranks[(census.ranks.index(census.rank) + 1) % len(census.ranks)]
        self._next = following if following in census.elsewhere() else None
        self._number = self._silent = self._unreached = 0
        self._last = ""

    def next(self) -> Lost | None:
        """One beat; the next rank when it has been silent for too long."""
        self._number += 1
        try:
            self._census.beat(self._number)
            heard = self._census.beat_of(self._next) if self._next is not None else "left"
        except RuntimeError:
            self._unreached += 1
            return STORE_GONE if self._unreached >= self._most_silent else None
        self._unreached = 0
        self._silent = 0 if heard != self._last or heard == "left" else self._silent + 1
        self._last = heard
        if self._next is None or self._silent < self._most_silent:
            return None
        where = self._census.whereabouts(self._next)
        return self._census.report(self._next, f"{where} has given no sign of life")


class StopRequest:
    """A request to stop that all ranks follow at the same step: SIGTERM to any of them.

    host: the channel over the ranks that must agree, `seqcomp.of(model).context.host`; None for one
    process. Entered in the main thread only, as signal handlers are.
    """

    def __init__(
        self, host: HostChannel | None, signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    ) -> None:
        self._host = host
        self._signals = signals
        self._requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in self._signals:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def request(self) -> None:
        """Asks for a stop at the next step boundary."""
        self._requested = True

    def agreed(self) -> bool:
        """Whether some rank was asked to stop: the same answer on all. Collective, every step.

        Raises RankLostError where a rank has ended.
        """
        if self._host is None:
            return self._requested
        return bool(self._host.all_max([int(self._requested)])[0])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request()
