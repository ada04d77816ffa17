"""CPU time of causal attention, forward and backward, on two gloo ranks against one process.

    python benchmarks/bench_attention.py [--repeats 7] [--length 8192] [--heads 8] [--head-dim 64]

Reports the busiest rank's CPU seconds over those of one process with the same kernel; one half is
perfect. The two are measured in turn and the minimum of the repeats is taken, which keeps the
ratio steady on a machine that does other work. One thread per rank. Exits with 1 when a ratio is
above its bar.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor

from seqcomp.layout.masks import Causal
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.attention import AttentionPlan, attention
from seqcomp.runtime.dist import process_context

BARS = {torch.bfloat16: 0.56, torch.float32: 0.60}
STRATEGIES = {"ring zigzag": "ring", "ulysses": "ulysses"}
WORLD = 2


def step(attend: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> None:
    q, k, v, dout = tensors
    out = attend(q, k, v)
    torch.autograd.grad(out, (q, k, v), dout)


def cpu_seconds(attend: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> float:
    gc.collect()
    dist.barrier()
    start = time.process_time()
    step(attend, tensors)
    return time.process_time() - start


def make(args: argparse.Namespace, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, dout as models have them: [B, S, H, d] in memory, seen as [B, H, S, d]."""
    rng = torch.Generator().manual_seed(dist.get_rank())
    shape = (1, length, args.heads, args.head_dim)
    tensors = [torch.randn(shape, generator=rng).to(dtype).transpose(1, 2) for _ in range(4)]
    return (*(x.requires_grad_() for x in tensors[:3]), tensors[3])


def measure(args: argparse.Namespace, dtype: torch.dtype, axis: str) -> tuple[float, float]:
    """(one process, busiest rank) CPU seconds."""
    ctx = process_context({axis: WORLD})
    comm = ctx.comm((axis,))
    alone_plan = AttentionPlan(Causal(), SequenceLayout("contiguous"))
    layout = SequenceLayout("zigzag", WORLD if axis == "ring" else 1)
    spread = partial(
        attention,
        plan=AttentionPlan(Causal(), layout),
        ring=comm if axis == "ring" else None,
        ulysses=comm if axis == "ulysses" else None,
    )
    alone = partial(attention, plan=alone_plan)
    whole, part = make(args, args.length, dtype), make(args, args.length // WORLD, dtype)
    singles, busiest = [], []
    for repeat in range(args.repeats + 1):
        single = torch.tensor([cpu_seconds(alone, whole) if dist.get_rank() == 0 else 0.0])
        if dist.get_rank() != 0:
            dist.barrier()
        dist.broadcast(single, 0)
        shared = torch.tensor([cpu_seconds(spread, part)])
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        if repeat:  # the first one warms up
            singles.append(single.item())
            busiest.append(shared.item())
    ctx.close()
    return min(singles), min(busiest)


def rank_main(rank: int, args: argparse.Namespace, port: int, verdict: list[bool]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    table = Table("strategy", "dtype", "one process (s)", "busiest rank (s)", "ratio", "bar")
    for (name, axis), (dtype, bar) in ((s, b) for s in STRATEGIES.items() for b in BARS.items()):
        single, busiest = measure(args, dtype, axis)
        ratio = busiest / single
        verdict[0] &= ratio <= bar
        cells = (f"{single:.3f}", f"{busiest:.3f}", f"{ratio:.3f}", f"{bar:.2f}")
        table.add_row(name, str(dtype).removeprefix("torch."), *cells)
    if rank == 0:
        Console().print(table)
    dist.destroy_process_group()
    if not verdict[0]:
        sys.exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    try:
        mp.spawn(rank_main, (args, port, [True]), nprocs=WORLD)
    except mp.ProcessExitedException:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
