"""Megatron-SP blocks compiled by seqcomp against torch's parallelize_module, on 2 gloo ranks.

    python benchmarks/bench_megatron_block.py [--repeats 9] [--layers 1] [--profile]

A block is RMSNorm, causal attention, RMSNorm and a SwiGLU MLP; B = 1, fp32, one thread a rank.
Tokens come in and go out cut over the ranks, on both sides: torch with SequenceParallel,
ColwiseParallel and RowwiseParallel and local tensors between the modules, as torchtitan does. One
step is forward and backward of all layers. The two sides are measured in turn, and of each the
minimum over the repeats is taken, of the rank that took longest. CPU time is held against the bar,
because it is steady on a machine that does other work; wall time stands beside it. seqcomp gathers
the inputs of column-parallel linears again in backward (10 collectives' bytes against 8), torch
keeps them.

Exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import seqcomp

RANKS = 2
HEAD_DIM = 64
# hidden, length, bar
CASES = ((256, 128, 0.75), (1024, 128, 0.95), (1024, 1024, 1.0))
PLAN = {
    "mesh": {"tensor": RANKS},
    "strategies": {"megatron_sp": {}},
    "inputs": {"x": {"batch": 0, "seq": 1}},
    "outputs": {"hidden": "sharded"},
}
Step = Callable[[], Tensor]


class Attention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, h] -> [B, S, h]; heads are what the projections give on this rank."""
        b, s, _ = x.shape
        q, k, v = (
            linear(x).view(b, s, -1, HEAD_DIM).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, 3 * hidden, bias=False)
        self.up = nn.Linear(hidden, 3 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(hidden), Attention(hidden)
        self.norm2, self.mlp = nn.RMSNorm(hidden), Mlp(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Blocks(nn.Module):
    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"hidden": x}


def by_torch(model: Blocks) -> None:
    """Megatron-SP with torch's own parallel styles."""
    mesh = init_device_mesh("cpu", (RANKS,))

    def gathered() -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))

    for block in model.layers:
        parallelize_module(
            block,
            mesh,
            {
                "norm1": SequenceParallel(),
                "attention": gathered(),
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.o": RowwiseParallel(output_layouts=Shard(1)),
                "norm2": SequenceParallel(),
                "mlp": gathered(),
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def timed(model: nn.Module, step: Step) -> tuple[float, float]:
    """(CPU, wall) seconds of forward and backward."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    step().backward()
    return time.process_time() - cpu, time.perf_counter() - wall


def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Of any gradient, relative to its size."""
    worst = 0.0
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        a, b = (t.grad.full_tensor() if isinstance(t.grad, DTensor) else t.grad for t in (p, q))
        worst = max(worst, float((a - b).norm() / b.norm()))
    return worst


def measure(hidden: int, length: int, args: argparse.Namespace, rank: int) -> dict[str, Any]:
    """On every rank: minima of CPU and wall seconds of both sides."""
    whole = torch.randn(1, length, hidden, generator=torch.Generator().manual_seed(1))
    part = whole.chunk(RANKS, 1)[rank].clone()
    weights = torch.randn(part.shape, generator=torch.Generator().manual_seed(2))
    theirs, ours = Blocks(hidden, args.layers), Blocks(hidden, args.layers)
    by_torch(theirs)
    seqcomp.parallelize(ours, plan=PLAN, example_inputs={"x": whole})
    sides: dict[str, tuple[nn.Module, Step]] = {
        "torch": (theirs, lambda: torch.sum(theirs(part)["hidden"] * weights)),
        "seqcomp": (ours, lambda: torch.sum(ours(whole)["hidden"] * weights)),
    }
    gc.collect()
    gc.freeze()  # so that what follows collects little, and not in the middle of a step
    gc.disable()
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for repeat in range(args.repeats + 2):
        for name, (model, step) in sides.items():
            taken = timed(model, step)
            if repeat >= 2:
                seen[name].append(taken)
    gc.enable()
    difference = largest_difference(ours, theirs)
    if args.profile and rank == 0:
        print(f"--- where seqcomp's time goes: hidden {hidden}, S {length}")
    if args.profile:
        profile(ours, sides["seqcomp"][1], rank)
    seqcomp.of(ours).close()
    best = {name: tuple(map(min, zip(*times, strict=True))) for name, times in seen.items()}
    return {"best": best, "difference": difference}


def profile(model: nn.Module, step: Step, rank: int) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(10):
        timed(model, step)
    profiler.disable()
    if rank == 0:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(14)


def rank_main(rank: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    missed = False
    table = Table("hidden", "S", "torch cpu (ms)", "seqcomp", "ratio", "bar",
                  "torch wall (ms)", "seqcomp", "ratio", "gradient difference")  # fmt: skip
    for hidden, length, bar in CASES:
        mine = measure(hidden, length, args, rank)
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, mine)
        slowest = {
            name: [max(one["best"][name][clock] for one in everyone) for clock in (0, 1)]
            for name in ("torch", "seqcomp")
        }
        row = [str(hidden), str(length)]
        for clock in (0, 1):
            torch_s, seqcomp_s = slowest["torch"][clock], slowest["seqcomp"][clock]
            row += [f"{1e3 * torch_s:.2f}", f"{1e3 * seqcomp_s:.2f}", f"{seqcomp_s / torch_s:.3f}"]
            if clock == 0:
                row.append(f"{bar:.2f}")
                missed |= seqcomp_s > bar * torch_s
        difference = max(one["difference"] for one in everyone)
        missed |= not difference < 1e-4
        table.add_row(*row, f"{difference:.1e}")
    if rank == 0:
        Console(width=120).print(table)
    dist.destroy_process_group()
    if missed:
        sys.exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(rank_main, (str(Path(folder) / "store"), args), nprocs=RANKS)
        except mp.ProcessExitedException as error:
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
