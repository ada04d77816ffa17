"""A rank that has ended, found and named, instead of "connection closed by peer" or a hang.

Every rank registers host and process id in the store of the process group. A rank whose collective
fails looks which processes of its host are gone; the first to find one writes it into the store,
where ranks of other hosts read it. Beats (see ``seqcomp.training.failure``) find a lost host.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

FIND_S = 10.0
"""How long a failed collective looks for the rank that failed it: a lost host shows by silence."""

_POLL_S = 0.05
_JOIN_S = 2.0
_STORE_S = 5.0
_LOST = "lost"
_CONNECTION = re.compile(
    r"clos|reset|broken pipe|connect|timed? ?out|remote|network|socket|abort", re.IGNORECASE
)


class RankLostError(RuntimeError):
    """A rank did not take part. ``rank`` is the global one that ended; None where it is not known,
    or where it may just be late.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[RankLostError], tuple[str, int | None]]:
        return type(self), (str(self), self.rank)


@dataclass(frozen=True)
class Lost:
    """A rank that has ended, and what is known about it."""

    rank: int
    why: str

    def error(self, doing: str) -> RankLostError:
        """What this rank raises, which was `doing` something with the others."""
        return RankLostError(f"rank {self.rank} {self.why}; this rank was in {doing}", self.rank)


STORE_GONE = Lost(0, "or the launcher, which hosts the store, does not answer")


class Census:
    """Which process is which rank. Making one registers this process and waits for nobody.

    Not to be shared by threads: a store client serves one call at a time.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        self.rank = rank
        self.ranks = tuple(sorted(ranks))
        self._reached = True
        # A launcher that starts ranks again may give them the same store.
        self._store = PrefixStore(f"seqcomp/census/{life()}", store)
        self._store.set(f"who/{rank}", f"{this_host()} {os.getpid()}")
        self._who: dict[int, list[str]] = {}
        self._meet()

    def wait_for_all(self, timeout_s: float = 300.0) -> None:
        """Until every rank has registered. Raises RankLostError with those that have not."""
        with contextlib.suppress(RuntimeError):
            keys = [f"who/{rank}" for rank in self.ranks]
            self._store.wait(keys, timedelta(seconds=timeout_s))
        self._meet()
        missing = self._strangers()
        if missing:
            raise RankLostError(f"ranks {missing} did not register within {timeout_s:g} s")

    def find(self, wait_s: float = 0.0) -> Lost | None:
        """The first rank that was lost, looked for during ``wait_s``; None where all are there."""
        start = reached = time.monotonic()
        end = start + wait_s
        while True:
            self._meet()
            found = self._told() or self._missing()
            now = time.monotonic()
            reached = now if self._reached else reached
            if found is None and now - reached > _STORE_S:
                return STORE_GONE
            if found is None and now - start > _JOIN_S and self._strangers():
                return self.report(self._strangers()[0], "ended before it joined the others")
            if found is not None or now >= end:
                return found
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def naming(self, doing: str) -> Iterator[None]:
        """Turns an error of a collective inside into RankLostError where a rank has ended.

        Any other error gets a note that says what was being done.
        """
        self._meet()  # while the store is there: it may end with a rank
        try:
            yield
        except RankLostError:
            raise
        except RuntimeError as error:
            found = self.find(FIND_S if is_connection_error(error) else 0.0)
            if found is not None:
                raise found.error(doing) from error
            error.add_note(f"in {doing}")
            raise

    def report(self, rank: int, why: str) -> Lost:
        """Tells all ranks that one is lost; what was told first holds."""
        mine = json.dumps({"rank": rank, "why": why})
        try:
            told = self._store.compare_set(_LOST, "", mine).decode()
        except RuntimeError:  # the store ended with its host
            told = mine
        return Lost(**json.loads(told or mine))

    def whereabouts(self, rank: int) -> str:
        """``process 123 of host n``, for messages."""
        host, pid = self._who[rank]
        return f"(process {pid} of {host.partition('/')[0]})"

    def elsewhere(self) -> tuple[int, ...]:
        """The ranks of other hosts, whose processes cannot be looked at."""
        return tuple(r for r, (host, _) in self._who.items() if host != this_host())

    def leave(self, wait_s: float) -> None:
        """This rank is done. Waits for the others as long as given: one may host the store."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "1")
            number, size = self._store.add("leaving", 1), len(self.ranks)
            everyone = f"all left/{(number - 1) // size}"
            if number % size == 0:
                self._store.set(everyone, "1")
            self._store.wait([everyone], timedelta(seconds=wait_s))

    def come_back(self) -> None:
        """Undoes `leave`."""
        self._store.delete_key(f"left/{self.rank}")

    def beat(self, number: int) -> None:
        """Shows other hosts that this rank is alive."""
        self._store.set(f"beat/{self.rank}", str(number))

    def beat_of(self, rank: int) -> str:
        """The last beat of a rank, "" before its first, "left" when it is done."""
        if self._store.check([f"left/{rank}"]):
            return "left"
        key = f"beat/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _told(self) -> Lost | None:
        try:
            told = self._store.get(_LOST) if self._store.check([_LOST]) else None
        except RuntimeError:
            self._reached = False
            return None
        self._reached = True
        return None if told is None else Lost(**json.loads(told))

    def _missing(self) -> Lost | None:
        for rank, (host, pid) in sorted(self._who.items()):
            if rank == self.rank or host != this_host() or not has_ended(int(pid)):
                continue
            if not self._has_left(rank):
                return self.report(rank, f"{self.whereabouts(rank)} has ended")
        return None

    def _has_left(self, rank: int) -> bool:
        try:
            return bool(self._store.check([f"left/{rank}"]))
        except RuntimeError:
            return False

    def _strangers(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self._who]

    def _meet(self) -> None:
        """Reads who has registered since; costs nothing once all have."""
        if len(self._who) == len(self.ranks):
            return
        with contextlib.suppress(RuntimeError):
            for rank in self._strangers():
                if self._store.check([f"who/{rank}"]):
                    self._who[rank] = self._store.get(f"who/{rank}").decode().rsplit(" ", 1)


def life() -> str:
    """Which life of the job this is under torchrun --max-restarts; "0" elsewhere."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def is_connection_error(error: BaseException) -> bool:
    """Whether an error may come from a rank that is not there."""
    return isinstance(error, RuntimeError) and _CONNECTION.search(str(error)) is not None


def own_store() -> Store:
    """A client of the default group's store of its own, whose calls never take long."""
    store: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=_STORE_S))
    return store


def this_host() -> str:
    """Processes with the same answer see each other's process ids."""
    try:
        return f"{platform.node()}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()


def has_ended(pid: int) -> bool:
    """Whether a process of this host is gone, or dead and not yet waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="ignore")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] in ("Z", "X")
