"""Joining the ranks of a job, also when the launcher has started them again."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from seqcomp.runtime.lost import life


def join(backend: str, *, timeout: timedelta = timedelta(minutes=10)) -> None:
    """`init_process_group` for a rank that torchrun has started.

    torchrun's ranks share one store over all restarts, and with it the addresses of the ranks that
    were there before; every life gets keys of its own here.
    """
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    dist.init_process_group(
        backend, store=PrefixStore(f"life {life()}", store), rank=rank, world_size=world,
        timeout=timeout,
    )  # fmt: skip
