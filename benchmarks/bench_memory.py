"""Resident memory of one training step on four ranks against one process, and its parts.

    python benchmarks/bench_memory.py [--length 4096] [--layers 2] [--mlp 1024] [--only fsdp]

Every process is a fresh one: it builds a small Llama, makes a step on a short row (compilation,
gradients, AdamW's moments), and then runs forward and backward on a long one. `step` is how far its
resident memory (VmHWM, reset before) rises above what was resident before; `saved` are the bytes
that autograd saves in the forward; `state` what parameters, gradients and moments take. The logits
are dropped. Exits with 1 when the busiest rank misses a bar.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import seqcomp

MIB = 2**20
VOCABULARY = 256
USP: dict[str, Any] = {
    "mesh": {"ring": 2, "ulysses": 2},
    "strategies": {"ring": {}, "ulysses": {}},
    "outputs": {"logits": "drop"},
}
FSDP = {**USP, "strategies": {**USP["strategies"], "fsdp": {}}}


@dataclass(frozen=True)
class Case:
    """A plan, and the most that `step` and `state` may be of one process's."""

    name: str
    plan: dict[str, Any] | None
    step: float | None = None
    state: float | None = None


CASES = (
    Case("one process, eager", None),
    Case("usp 2x2", USP, step=1.1 / 4),
    Case("usp 2x2, loss_chunks 8", {**USP, "memory": {"loss_chunks": 8}}, step=1.1 / 4),
    Case("usp 2x2, selective", {**USP, "memory": {"checkpoint": "selective"}}, step=0.8 / 4),
    Case("usp 2x2, fsdp", FSDP, state=1.05 / 4),
)


def kib(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def settled() -> int:
    """Bytes resident when what is free has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return kib("VmRSS")


def build(args: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=args.mlp,
            num_hidden_layers=args.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=args.length,
            use_cache=False,
        )
    )
    return model


def loss_of(model: nn.Module, length: int) -> Tensor:
    ids = (torch.arange(length) * 7919 % VOCABULARY).unsqueeze(0)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def saved_bytes(model: nn.Module, length: int) -> int:
    """Storages that autograd saves, those of parameters left out, each once, when the forward has
    ended: what FSDP gathered is free again."""
    own = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        pointer = x.untyped_storage().data_ptr()
        if pointer not in own:
            seen[pointer] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss_of(model, length)
    return sum(x.untyped_storage().nbytes() for x in seen.values())


def local(x: Any) -> Tensor:
    """This rank's part of x."""
    part: Tensor = x.detach().to_local() if hasattr(x, "to_local") else x
    return part


def measure(args: argparse.Namespace, case: Case) -> tuple[int, int, int]:
    """Bytes of this process: (step, saved, state)."""
    model = build(args)
    if case.plan is not None:
        seqcomp.parallelize(model, case.plan)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, 256).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    moments = [x for own in optimizer.state.values() for x in own.values()]
    held = [*model.parameters(), *(p.grad for p in model.parameters()), *moments]
    state = sum(local(x).nbytes for x in held)
    before = settled()
    Path("/proc/self/clear_refs").write_text("5")
    loss_of(model, args.length).backward()
    step = kib("VmHWM") - before
    saved = saved_bytes(model, args.length)
    if case.plan is not None:
        seqcomp.of(model).close()
    return step, saved, state


def rank_main(rank: int, args: argparse.Namespace, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    world = 1 if case.plan is None else 4
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    own = torch.tensor(measure(args, case))
    dist.all_reduce(own, dist.ReduceOp.MAX)
    if rank == 0:
        torch.save(own, f"{folder}/found.pt")
    dist.destroy_process_group()


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--mlp", type=int, default=1024)
    parser.add_argument("--only", help="of the plans, those with this in their name")
    args = parser.parse_args()
    # Memory that is free goes back at once: what is resident is what is in use.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    table = Table(
        "", "step MiB", "of one", "bar", "saved MiB", "of one", "state MiB", "of one", "bar"
    )
    wanted: list[int] = []
    right = True
    for case in CASES:
        if case.plan is not None and (args.only or "") not in case.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_main, (args, case, folder), nprocs=1 if case.plan is None else 4)
            found = torch.load(f"{folder}/found.pt").tolist()
        wanted = wanted or found
        bars = (case.step, None, case.state)
        shares = [value / whole for value, whole in zip(found, wanted, strict=True)]
        right &= all(b is None or share <= b for share, b in zip(shares, bars, strict=True))
        cells = [
            (f"{value / MIB:.1f}", f"{share:.3f}", "" if bar is None else f"{bar:.3f}")
            for value, share, bar in zip(found, shares, bars, strict=True)
        ]
        table.add_row(case.name, *cells[0], *cells[1][:2], *cells[2])
        print(case.name, *cells, flush=True)
    Console(width=110).print(table)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
