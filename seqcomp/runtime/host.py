"""The host side of real ranks: small integers and strings, beside the model's collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from seqcomp.runtime.comm import HostChannel, KeyValueStore
from seqcomp.runtime.lost import Census

_HOST_TAG = 0x5EC0
"""Keeps the host channel's messages apart from others on the same group."""

_LOOK_S = 2.0  # between looks for ended ranks


class GlooHost(HostChannel):
    """Point-to-point messages on a gloo group."""

    # A maximum may count a rank twice, so ceil(log2 P) rounds of doubling distance do for any P;
    # gloo's own all-reduce takes 2(P-1).

    def __init__(self, group: dist.ProcessGroup, census: Census) -> None:
        self._group = group
        self._census = census

    def all_max(self, values: Sequence[int], *, timeout_s: float = 300.0) -> list[int]:
        with self._census.naming("an agreement of all ranks"):
            return self._all_max(values, timeout_s)

    def _all_max(self, values: Sequence[int], timeout_s: float) -> list[int]:
        size, rank = self._group.size(), self._group.rank()
        best = torch.tensor(list(values), dtype=torch.int64)
        distance = 1
        while distance < size:
            theirs = torch.empty_like(best)
            works = (
                self._group.recv([theirs], (rank - distance) % size, _HOST_TAG),
                self._group.send([best], (rank + distance) % size, _HOST_TAG),
            )
            for work in works:
                work.wait(timedelta(seconds=timeout_s))
            best = torch.maximum(best, theirs)
            distance *= 2
        return best.tolist()

    def of_first(self, draw: Callable[[], int], *, timeout_s: float = 300.0) -> int:
        number = draw()
        return self.all_max([number if self._group.rank() == 0 else -1], timeout_s=timeout_s)[0]


class LonelyHost(HostChannel):
    """A mesh of one rank."""

    def all_max(self, values: Sequence[int], *, timeout_s: float = 300.0) -> list[int]:
        return list(values)

    def of_first(self, draw: Callable[[], int], *, timeout_s: float = 300.0) -> int:
        return draw()


class PrefixedStore(KeyValueStore):
    """The store of the default process group, under a prefix of our own."""

    def __init__(self, census: Census) -> None:
        self._census = census
        default = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore("seqcomp", default)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str, *, timeout_s: float = 300.0) -> str:
        end = time.monotonic() + timeout_s
        while True:
            try:
                self._store.wait([key], timedelta(seconds=min(_LOOK_S, timeout_s)))
                return self._store.get(key).decode()
            except dist.DistStoreError as error:
                found = self._census.find()
                if found is not None:
                    raise found.error(f"an agreement of all ranks ({key})") from error
                if time.monotonic() >= end:
                    raise TimeoutError(f"no rank set {key!r} within {timeout_s:g} s") from error
