"""How `train_text.py` starts processes, and how it ends them."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from seqcomp import PlanError


def on_gpus(local_ranks: int) -> bool:
    """Whether every rank of this machine can have a GPU."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks


def start_processes(main: Callable[..., None], number: int, limit_s: float, *args: Any) -> None:
    """Runs `main(index, *args)` in new processes and waits for them.

    Raises SystemExit when one of them ends itself, TimeoutError past the time limit.
    """
    end = time.monotonic() + limit_s
    # It would report that the others are ended after the first, which is meant.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    running = mp.start_processes(
        main, args, number, join=False, daemon=True, start_method="spawn"
    )  # fmt: skip
    try:
        while not running.join(timeout=1.0):
            if time.monotonic() > end:
                raise TimeoutError(f"{main.__name__} took more than {limit_s:.0f} s")
    except mp.ProcessExitedException as error:
        raise SystemExit(error.exit_code) from None
    finally:
        for process in running.processes:
            process.kill()


def free_port() -> int:
    """A TCP port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def set_up_as_torchrun(rank: int, world: int, port: int) -> None:
    """The variables that torchrun sets, for ranks that are all on this machine."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def refuse(error: PlanError) -> None:
    """Ends this process with the text of the error, without a traceback; one rank shows it."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(error, file=sys.stderr, flush=True)
    else:
        time.sleep(1)  # launchers end all ranks at the first exit: rank 0 speaks first
    raise SystemExit(1)
