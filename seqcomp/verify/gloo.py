"""A job on every rank of a plan, on real processes of this machine that talk over gloo."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from seqcomp.api import attach, of
from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.runtime.comm import RankContext
from seqcomp.runtime.dist import process_context
from seqcomp.verify.lockstep import local_inputs
from seqcomp.verify.observe import ModelFn, seeded

T = TypeVar("T")


@dataclass(frozen=True)
class _Work:
    model_fn: ModelFn
    inputs_fn: Callable[[], Mapping[str, Any]]
    resolved: ResolvedPlan
    job: Callable[..., Any]
    keep_global: bool
    folder: Path
    timeout: float


def on_processes(
    model_fn: ModelFn,
    resolved: ResolvedPlan,
    job: Callable[[torch.nn.Module, RankContext, Mapping[str, Any]], T],
    *,
    inputs_fn: Callable[[], Mapping[str, Any]],
    keep_global: bool = False,
    timeout: float = 300.0,
    on_rank: Callable[[], None] = lambda: None,
) -> list[T]:
    """`job(compiled, context, local_inputs)` on every rank, in new processes; in order of rank.

    model_fn, inputs_fn, job: importable functions (they are pickled). timeout: seconds in all.

    Raises PlanError as the ranks do, SC025 for functions that cannot be pickled, RuntimeError with
    the traceback of the first rank that fails, TimeoutError.
    """
    ranks = math.prod(resolved.axes.values())
    with tempfile.TemporaryDirectory(prefix="seqcomp-verify-") as name:
        work = _Work(model_fn, inputs_fn, resolved, job, keep_global, Path(name), timeout)
        _require_picklable(work)
        _run(work, ranks, timeout, on_rank)
        # Written by our own ranks a moment ago, in a folder that only this user can read.
        found = [_load(work.folder, rank) for rank in range(ranks)]
    failed = [x for x in found if isinstance(x, _Failure)]
    if failed:
        # The others fail when the first one is gone.
        raise min(failed, key=lambda x: x.at).error
    return found


@dataclass(frozen=True)
class _Failure:
    error: Exception
    at: float = math.inf


def _require_picklable(work: _Work) -> None:
    try:
        pickle.dumps(work)
    except Exception as error:
        raise PlanError(
            diagnostic(
                "SC025",
                where="verify(backend='gloo')",
                found=f"{type(error).__name__}: {error}",
                legal="functions at the top level of an importable module, or partials of them",
                help="define model_fn and inputs_fn in a module, or use backend='lockstep'",
            )
        ) from error


def _run(work: _Work, ranks: int, timeout: float, on_rank: Callable[[], None]) -> None:
    end = time.monotonic() + timeout
    # It would report that the others are ended after the first, which is meant.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    running = start_processes(
        _rank_main, (ranks, work), ranks, join=False, daemon=True, start_method="spawn"
    )
    done: set[int] = set()
    try:
        while not running.join(timeout=0.2):
            fresh = {r for r in range(ranks) if _file(work.folder, r).exists()} - done
            done |= fresh
            for _ in fresh:
                on_rank()
            if time.monotonic() > end:
                late = sorted(set(range(ranks)) - done)
                raise TimeoutError(f"ranks {late} were not ready within {timeout:g} s")
    except ProcessRaisedException as error:
        raise RuntimeError(f"a rank failed:\n{error}") from error
    except ProcessExitedException as error:
        raise RuntimeError(f"rank {error.error_index} ended without a word: {error}") from error
    finally:
        for process in running.processes:
            process.kill()
            process.join()


def _rank_main(rank: int, ranks: int, work: _Work) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{work.folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=work.timeout),
    )
    result: Any
    try:
        result = _result(work)
    except PlanError as error:
        result = _Failure(error, time.time())
    except Exception:
        text = f"rank {rank} failed:\n{traceback.format_exc()}"
        result = _Failure(RuntimeError(text), time.time())
    _store(result, work.folder, rank)
    if isinstance(result, _Failure) and not isinstance(result.error, PlanError):
        os._exit(0)  # the others may be waiting in a collective; the parent reads what failed
    with contextlib.suppress(Exception):  # another rank failed, and says so itself
        dist.barrier()
    dist.destroy_process_group()


def _result(work: _Work) -> Any:
    model = seeded(work.model_fn)
    context = process_context(dict(work.resolved.axes))
    local = local_inputs(work.inputs_fn(), work.resolved, context)
    attach(
        model,
        work.resolved,
        context,
        example_inputs=local if work.resolved.tensor_size > 1 else None,
        keep_global=work.keep_global,
    )
    try:
        return work.job(model, context, local)
    finally:
        of(model).close()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.result"


def _store(result: Any, folder: Path, rank: int) -> None:
    part = folder / f"{rank}.part"
    torch.save(result, part)
    part.rename(_file(folder, rank))


def _load(folder: Path, rank: int) -> Any:
    path = _file(folder, rank)
    if not path.exists():
        return _Failure(RuntimeError(f"rank {rank} gave no result"))
    return torch.load(path, weights_only=False)
