"""The host side of real ranks: small integers and strings, beside the model's collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from seqcomp.runtime.comm import HostChannel, KeyValueStore

_HOST_TAG = 0x5EC0
"""Keeps the host channel's messages apart from others on the same group."""


class GlooHost(HostChannel):
    """Point-to-point messages on a gloo group."""

    # A maximum may count a rank twice, so ceil(log2 P) rounds of doubling distance do for any P;
    # gloo's own all-reduce takes 2(P-1).

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_max(self, values: Sequence[int], *, timeout_s: float = 300.0) -> list[int]:
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

    def __init__(self) -> None:
        default = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore("seqcomp", default)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str, *, timeout_s: float = 300.0) -> str:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            raise TimeoutError(f"no rank set {key!r} within {timeout_s:g} s") from error
        return self._store.get(key).decode()
