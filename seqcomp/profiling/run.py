"""Measures on ranks that it starts, or on those of a job that torchrun has started."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from seqcomp.profiling.document import cluster_document
from seqcomp.profiling.kernels import measure_kernels
from seqcomp.profiling.links import group_sizes, measure_groups
from seqcomp.profiling.measured import MeasuredRate
from seqcomp.profiling.sizes import CPU, GPU, Sizes
from seqcomp.runtime.dist import process_context

Tell = Callable[[str], None]


@dataclass(frozen=True)
class _Job:
    sizes: Sizes
    dtypes: tuple[str, ...]
    threads: int
    folder: Path
    said: Any
    """A queue of what is measured now, of rank 0; a dict in it is the result."""


def under_torchrun() -> bool:
    """Whether this process is one rank of a job."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def default_ranks() -> int:
    """One for each GPU, or two processes."""
    return torch.cuda.device_count() or 2


def default_sizes() -> Sizes:
    """For the devices of this machine."""
    return GPU if torch.cuda.is_available() else CPU


def profile_here(
    sizes: Sizes, dtypes: tuple[str, ...], tell: Tell, *, threads: int = 1
) -> dict[str, Any] | None:
    """The document, on rank 0 of a job that torchrun has started; None on the others."""
    torch.set_num_threads(threads)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    backend = _backend(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if backend == "nccl":
        torch.cuda.set_device(local)
    dist.init_process_group(backend)
    try:
        return _measure(sizes, dtypes, tell)
    finally:
        dist.destroy_process_group()


def profile_on(
    ranks: int,
    sizes: Sizes,
    dtypes: tuple[str, ...],
    tell: Tell,
    *,
    threads: int = 1,
    timeout: float = 600.0,
) -> dict[str, Any]:
    """The document, of ``ranks`` new processes of this machine: NCCL where each has a GPU, gloo
    with ``threads`` threads each otherwise.

    Raises RuntimeError where a rank fails, TimeoutError after ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="seqcomp-bench-") as folder:
        said = mp.get_context("spawn").SimpleQueue()
        job = _Job(sizes, dtypes, threads, Path(folder), said)
        running = start_processes(
            _rank_main, (ranks, job), ranks, join=False, daemon=True, start_method="spawn"
        )
        end, found, ended = time.monotonic() + timeout, None, False
        try:
            while not ended:
                ended = running.join(timeout=0.1)
                while not said.empty():
                    item = said.get()
                    if isinstance(item, dict):
                        found = item
                    else:
                        tell(item)
                if time.monotonic() > end:
                    raise TimeoutError(f"not measured within {timeout:g} s")
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RuntimeError(f"a rank failed:\n{error}") from error
        finally:
            for process in running.processes:
                process.kill()
                process.join()
    assert found is not None, "rank 0 ended without a result"
    return found


def _rank_main(rank: int, ranks: int, job: _Job) -> None:
    torch.set_num_threads(job.threads)
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    backend = _backend(ranks)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{job.folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    found = _measure(job.sizes, job.dtypes, job.said.put if rank == 0 else lambda text: None)
    if found is not None:
        job.said.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _backend(local_ranks: int) -> str:
    return "nccl" if 0 < local_ranks <= torch.cuda.device_count() else "gloo"


def _measure(sizes: Sizes, dtypes: tuple[str, ...], tell: Tell) -> dict[str, Any] | None:
    world = dist.get_world_size()
    node = min(int(os.environ.get("LOCAL_WORLD_SIZE", world)), world)
    nodes = world // node
    context = process_context({"all": world})
    try:
        kernels = measure_kernels(context, sizes, dtypes, tell)
    finally:
        context.close()
    inside: list[MeasuredRate] = []
    for size in group_sizes(node):
        mesh = {"rest": world // size, "measured": size}
        inside += measure_groups(mesh, sizes, tell)
    across: list[MeasuredRate] = []
    for size in group_sizes(nodes):
        mesh = {"rest": nodes // size, "measured": size, "node": node}
        across += measure_groups(mesh, sizes, tell)
    if dist.get_rank() != 0:
        return None
    backend = dist.get_backend()
    device = torch.cuda.get_device_name() if backend == "nccl" else _processor()
    return cluster_document(
        kernels,
        inside,
        across,
        name=f"{world} ranks on {device}",
        device=device,
        transport=backend,
        ranks_per_node=node,
        nodes=nodes,
    )


def _processor() -> str:
    threads = torch.get_num_threads()
    name = platform.processor() or platform.machine()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''} of {os.cpu_count()}"
