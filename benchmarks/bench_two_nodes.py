"""Attention over two machines with a slow link: ring across and ulysses inside, against ulysses.

    python benchmarks/bench_two_nodes.py [--mbit 100] [--length 8192] [--repeats 5] [--paced 12]

Needs Linux and root: the machines are network namespaces joined by a veth pair, whose rate
`tc tbf` limits in both directions; each has two ranks, started by `torchrun --nnodes 2`. Wall time,
forward and backward, causal, fp32, minimum of the repeats. `hidden` is the part of the ring's
time on the link that the step does not wait for: 1 - (limited - free) / (bytes / rate), where
`free` is the same without a limit. The processes share the cores of this machine. `--paced NS`:
kernels compute nothing but sleep, NS nanoseconds for a pair of a head and 2.5 times that in
backward; what hides behind them is then the same on a machine that others use as well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from namespaces import two_machines
from rich.console import Console
from rich.table import Table
from torch import Tensor

from seqcomp.layout.masks import Causal
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.attention import AttentionPlan, attention, kernels
from seqcomp.runtime.attention.kernels import Grads, Kernel
from seqcomp.runtime.dist import process_context

LOCAL = 2
STRATEGIES = {"ring across, ulysses inside": (2, 2), "ulysses across": (1, 4)}


def measure(args: argparse.Namespace, ring: int, ulysses: int) -> dict[str, float]:
    """Seconds of a step on the slowest rank, and the bytes a rank sends over each axis."""
    context = process_context({"ring": ring, "ulysses": ulysses})
    attend = partial(
        attention,
        plan=AttentionPlan(Causal(), SequenceLayout("zigzag", ring, ulysses)),
        ring=context.comm(("ring",)) if ring > 1 else None,
        ulysses=context.comm(("ulysses",)),
    )
    shape = (1, args.length // (ring * ulysses), args.heads, args.head_dim)
    narrow = (*shape[:2], args.kv_heads, args.head_dim)
    q, k, v, dout = (
        torch.randn(size).transpose(1, 2).requires_grad_(need)
        for size, need in ((shape, True), (narrow, True), (narrow, True), (shape, False))
    )
    seconds = []
    for _ in range(args.repeats + 1):
        context.traffic.reset()
        dist.barrier()
        start = time.perf_counter()
        torch.autograd.grad(attend(q, k, v), (q, k, v), dout)
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(took.item())
    sent = {axis: float(context.traffic.bytes(axis)) for axis in ("ring", "ulysses")}
    context.close()
    return {"seconds": min(seconds[1:]), **sent}


def paced(ns: float) -> Kernel:
    """A kernel that takes its time and computes nothing."""

    def sleep(q: Tensor, k: Tensor, *, causal: bool, factor: float) -> None:
        pairs = q.shape[:-1].numel() * k.shape[2] / (2 if causal else 1)
        time.sleep(factor * ns * 1e-9 * pairs)

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object
    ) -> tuple[Tensor, Tensor]:
        sleep(q, k, causal=causal, factor=1)
        return v.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3])

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, causal: bool, **_: object
    ) -> Grads:
        sleep(q, k, causal=causal, factor=2.5)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    return Kernel("paced", forward, backward, grouped=True)


def work(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if args.paced:
        kernels.kernel = lambda name, **_: paced(args.paced)
    dist.init_process_group("gloo")
    found = {name: measure(args, *sizes) for name, sizes in STRATEGIES.items()}
    if dist.get_rank() == 0:
        Path(args.out).write_text(json.dumps(found))
    dist.destroy_process_group()


def launch(args: argparse.Namespace, mbit: int | None, out: Path) -> dict[str, dict[str, float]]:
    """Both machines' torchrun, over a link of a rate; what rank 0 found."""
    options = [f"--{k.replace('_', '-')}={v}" for k, v in vars(args).items() if v]
    running: list[subprocess.Popen[bytes]] = []
    with two_machines(mbit) as machines:
        try:
            for number, machine in enumerate(machines):
                command = machine.torchrun(
                    number, machines[0], LOCAL, __file__, *options, f"--out={out}"
                )
                running.append(subprocess.Popen(command, env=machine.environment()))
            for process in running:
                if process.wait(timeout=600):
                    raise SystemExit(f"torchrun ended with {process.returncode}")
        finally:
            for process in running:
                process.terminate()
    found: dict[str, dict[str, float]] = json.loads(out.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--paced", type=float, default=0.0, metavar="NS")
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        limited = launch(args, args.mbit, Path(folder) / "limited")
        free = launch(args, None, Path(folder) / "free")
    table = Table("", f"at {args.mbit} Mbit/s (s)", "no limit (s)", "hidden")
    for name, row in limited.items():
        on_link = row["ring"] * LOCAL * 8 / (args.mbit * 1e6)
        waited = row["seconds"] - free[name]["seconds"]
        hidden = f"{1 - waited / on_link:.2f}" if on_link else ""
        table.add_row(name, f"{row['seconds']:.2f}", f"{free[name]['seconds']:.2f}", hidden)
    Console().print(table)
    usp, ulysses = (limited[name]["seconds"] for name in STRATEGIES)
    Console().print(f"ring across / ulysses across: {usp / ulysses:.3f}")


if __name__ == "__main__":
    main()
