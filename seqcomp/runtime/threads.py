"""Ranks as threads of one process: the same runtime code without process groups.

Every exchange is a rendezvous of the group's threads; reductions add in rank order, so results
are bitwise reproducible. Meant for verification and tests, where 64 ranks fit on a laptop.

Ranks take turns: no more of them run at a time than half the cores, the others wait. Threads that
all run at once spend half of their time on passing the interpreter's lock around.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from seqcomp.runtime.comm import (
    Arrived,
    Communicator,
    HostChannel,
    KeyValueStore,
    Pending,
    RankContext,
    Reduction,
    sum_in_rank_order,
)
from seqcomp.runtime.traffic import Traffic

T = TypeVar("T")


class RankAbortedError(RuntimeError):
    """Raised in a waiting rank when another rank failed."""


class ThreadWorld:
    """W = product of ``sizes`` (axis -> size, outermost first) ranks, row-major.

    ``timeout_s`` bounds every wait for another rank; TimeoutError names what was waited for.
    """

    def __init__(
        self, sizes: dict[str, int], *, device: torch.device | None = None, timeout_s: float = 60.0
    ) -> None:
        self.sizes = dict(sizes)
        self.device = device or torch.device("cpu")
        self.timeout_s = timeout_s
        self.places = list(itertools.product(*(range(n) for n in sizes.values())))
        self._rooms: dict[tuple[Any, ...], _Room] = {}
        self._lock = threading.Lock()
        self._values: dict[str, str] = {}
        self._values_changed = threading.Condition()
        self._aborted = threading.Event()
        self.turns = threading.Semaphore(max(1, (os.cpu_count() or 1) // 2))

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Others take the turn of the rank that waits in here."""
        self.turns.release()
        try:
            yield
        finally:
            self.turns.acquire()

    def context(self, rank: int) -> RankContext:
        """The context of one rank; use it in that rank's thread only."""
        return _ThreadContext(self, rank)

    def abort(self) -> None:
        """Wake every waiting rank with RankAbortedError, now and later."""
        self._aborted.set()
        with self._lock:
            conditions = [room.changed for room in self._rooms.values()]
        for condition in (*conditions, self._values_changed):
            with condition:
                condition.notify_all()

    def room(self, key: tuple[Any, ...], size: int) -> _Room:
        """The meeting place of one group, the same object for all of its ranks."""
        with self._lock:
            return self._rooms.setdefault(key, _Room(self, size))

    def wait(
        self, condition: threading.Condition, ready: Callable[[], bool], what: str, timeout_s: float
    ) -> None:
        """Wait, holding ``condition``, until ready, aborted or late."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self._aborted.is_set():
                raise RankAbortedError(f"another rank failed while this one waited for {what}")
            left = deadline - time.monotonic()
            if left <= 0 or not condition.wait(left):
                if ready():
                    return
                raise TimeoutError(f"not all ranks reached {what} within {timeout_s:g} s")

    def set_value(self, key: str, value: str) -> None:
        with self._values_changed:
            self._values[key] = value
            self._values_changed.notify_all()

    def get_value(self, key: str, timeout_s: float) -> str:
        with self.away(), self._values_changed:
            self.wait(self._values_changed, lambda: key in self._values, repr(key), timeout_s)
            return self._values[key]


def run_ranks(
    fn: Callable[[RankContext], T],
    sizes: dict[str, int],
    timeout: float = 60.0,
    *,
    device: torch.device | None = None,
) -> list[T]:
    """``fn(ctx)`` on every rank, each in its own thread; the results in rank order.

    The first failure is raised here after the other ranks have been released; ``timeout`` bounds
    every wait of a rank for another. The backward runs in the rank's own thread, also on
    accelerators. Threads start with torch's default grad and autocast modes.
    """
    world = ThreadWorld(sizes, device=device, timeout_s=timeout)
    results: list[Any] = [None] * len(world.places)
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            with world.turns, torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(world.context(rank))
        except BaseException as error:
            failures.append(error)
            world.abort()

    threads_before = torch.get_num_threads()
    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(len(world.places))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        world.abort()
        raise
    finally:
        torch.set_num_threads(threads_before)
    if failures:
        first = next((e for e in failures if not isinstance(e, RankAbortedError)), failures[0])
        raise first
    return results


class _Room:
    """Rendezvous of one group: numbered all-to-all meetings, and a mailbox for each pair."""

    def __init__(self, world: ThreadWorld, size: int) -> None:
        self.changed = threading.Condition()
        self._world = world
        self._size = size
        self._reached = [0] * size
        self._meetings: dict[int, dict[int, Any]] = {}
        self._left: dict[int, int] = {}
        self._mail: dict[tuple[int, int, int], list[Tensor]] = {}

    def meet(self, rank: int, what: str, value: Any, timeout_s: float) -> list[Any]:
        """Everybody's value in rank order. The ranks must agree on ``what`` they came for."""
        with self._world.away(), self.changed:
            number = self._reached[rank] = self._reached[rank] + 1
            meeting = self._meetings.setdefault(number, {})
            meeting[rank] = (what, value)
            if len(meeting) == self._size:
                self.changed.notify_all()
            self._world.wait(self.changed, lambda: len(meeting) == self._size, what, timeout_s)
            self._left[number] = self._left.get(number, 0) + 1
            if self._left[number] == self._size:
                del self._meetings[number], self._left[number]
        reasons = sorted({meeting[i][0] for i in range(self._size)})
        if len(reasons) > 1:
            raise RuntimeError(f"ranks met for different things: {'; '.join(reasons)}")
        return [meeting[i][1] for i in range(self._size)]

    def send(self, source: int, to: int, number: int, tensors: list[Tensor]) -> None:
        with self.changed:
            self._mail[source, to, number] = tensors
            self.changed.notify_all()

    def receive(self, source: int, to: int, number: int, timeout_s: float) -> list[Tensor]:
        with self._world.away(), self.changed:
            box, what = (source, to, number), f"the send of rank {source} to {to}"
            self._world.wait(self.changed, lambda: box in self._mail, what, timeout_s)
            return self._mail.pop(box)


class _ThreadContext(RankContext):
    def __init__(self, world: ThreadWorld, rank: int) -> None:
        coords = dict(zip(world.sizes, world.places[rank], strict=True))
        super().__init__(world.sizes, coords, rank, world.device)
        self._world = world
        self._comms: dict[tuple[str, ...], _ThreadCommunicator] = {}
        self.host = _ThreadHost(world, rank)
        self.store = _ThreadStore(world)

    def comm(self, axes: tuple[str, ...]) -> Communicator:
        if axes not in self._comms:
            size, rank = self._nested(axes)
            others = tuple((n, c) for n, c in self.coords.items() if n not in axes)
            room = self._world.room((axes, others), size)
            timeout_s = self._world.timeout_s
            self._comms[axes] = _ThreadCommunicator(axes, size, rank, self.traffic, room, timeout_s)
        return self._comms[axes]

    def close(self) -> None:
        self._comms.clear()


class _ThreadCommunicator(Communicator):
    # Deposits are copies: the depositor may go on and overwrite its tensor while others read.

    def __init__(
        self,
        axes: tuple[str, ...],
        size: int,
        rank: int,
        traffic: Traffic,
        room: _Room,
        timeout_s: float,
    ) -> None:
        super().__init__("+".join(axes), size, rank, traffic)
        self._room = room
        self._timeout_s = timeout_s
        self._exchanges = 0

    def _start_all_gather(self, x: Tensor) -> Pending:
        return Arrived([torch.stack(self._meet("all_gather", x))])

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        return sum_in_rank_order([rows[self.rank] for rows in self._meet("reduce_scatter", x)])

    def _start_all_reduce(self, x: Tensor, op: Reduction) -> Pending:
        given = self._meet(f"all_reduce {op}", x)
        return Arrived([sum_in_rank_order(given) if op == "sum" else torch.stack(given).amax(0)])

    def _all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([given[self.rank] for given in self._meet("all_to_all", x)])

    def _start_exchange(
        self, sends: list[Tensor], receives: list[Tensor], to: int, source: int
    ) -> Pending:
        self._exchanges += 1
        if sends:
            self._room.send(self.rank, to, self._exchanges, [x.clone() for x in sends])
        if not receives:
            return Arrived([])
        return _Mail(self._room, (source, self.rank, self._exchanges), self._timeout_s, receives)

    def _exchange_all(self, sends: list[Tensor], receives: list[Tensor]) -> None:
        given = self._room.meet(
            self.rank, f"exchange over {self.axis}", [x.clone() for x in sends], self._timeout_s
        )
        for out, row in zip(receives, given, strict=True):
            out.copy_(row[self.rank])

    def _meet(self, what: str, x: Tensor) -> list[Tensor]:
        what = f"{what} of {list(x.shape)} {x.dtype} over {self.axis}"
        return self._room.meet(self.rank, what, x.clone(), self._timeout_s)


class _Mail(Pending):
    def __init__(
        self, room: _Room, box: tuple[int, int, int], timeout_s: float, like: list[Tensor]
    ) -> None:
        self._room = room
        self._box = box
        self._timeout_s = timeout_s
        self._shapes = [x.shape for x in like]

    def wait(self) -> list[Tensor]:
        found = self._room.receive(*self._box, self._timeout_s)
        assert [x.shape for x in found] == self._shapes, "the two ranks disagree on a message"
        return found


class _ThreadHost(HostChannel):
    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._room = world.room(("host",), len(world.places))
        self._rank = rank

    def all_max(self, values: Sequence[int], *, timeout_s: float = 300.0) -> list[int]:
        what = f"all_max of {len(values)} integers"
        given = self._room.meet(self._rank, what, list(values), timeout_s)
        return [max(column) for column in zip(*given, strict=True)]

    def of_first(self, draw: Callable[[], int], *, timeout_s: float = 300.0) -> int:
        # The random state belongs to the process: it is drawn from once, when all have arrived
        # and none can be at work on it.
        self.all_max([0], timeout_s=timeout_s)
        number = draw() if self._rank == 0 else -1
        return self.all_max([number], timeout_s=timeout_s)[0]


class _ThreadStore(KeyValueStore):
    def __init__(self, world: ThreadWorld) -> None:
        self._world = world

    def set(self, key: str, value: str) -> None:
        self._world.set_value(key, value)

    def get(self, key: str, *, timeout_s: float = 300.0) -> str:
        return self._world.get_value(key, timeout_s)
