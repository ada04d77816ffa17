"""CPU time of a compiled module on a plan of all ones against the module as its author wrote it.

    python benchmarks/bench_overhead.py [--repeats 9] [--length 512] [--layers 4]

One step is forward and backward of a transformers Llama with its loss. The two are measured in
turn, and the minimum of the repeats is taken, which keeps the ratio steady on a machine that does
other work. One thread. Exits with 1 when the compiled step costs more than 5 % extra.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import seqcomp

BAR = 1.05
SHORTEST_STEP_S = 0.150
ALL_ONES = {"mesh": {"ring": 1, "ulysses": 1}, "strategies": {"ring": {}, "ulysses": {}}}


def llama(args: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048, hidden_size=args.hidden, intermediate_size=2 * args.hidden,
            num_hidden_layers=args.layers, num_attention_heads=8, num_key_value_heads=4,
            max_position_embeddings=args.length, use_cache=False,
        )
    )  # fmt: skip


def step(model: nn.Module, batch: dict[str, Tensor]) -> float:
    """Seconds of CPU time of forward and backward."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    start = time.process_time()
    model(**batch).loss.backward()
    return time.process_time() - start


def measure(args: argparse.Namespace) -> tuple[list[float], list[float], float]:
    """CPU seconds (eager, compiled) of every repeat, and the largest difference of a gradient."""
    eager = llama(args)
    compiled = seqcomp.parallelize(copy.deepcopy(eager), plan=ALL_ONES)
    ids = torch.randint(2048, (1, args.length), generator=torch.Generator().manual_seed(1))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    for _ in range(2):
        step(eager, batch)
        step(compiled, batch)
    pairs = [(step(eager, batch), step(compiled, batch)) for _ in range(args.repeats)]
    difference = max(
        float((a.grad - b.grad).norm() / a.grad.norm())  # type: ignore[operator, union-attr]
        for a, b in zip(eager.parameters(), compiled.parameters(), strict=True)
    )
    return [a for a, _ in pairs], [b for _, b in pairs], difference


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    eager, compiled, difference = measure(args)
    ratio = min(compiled) / min(eager)
    table = Table("eager (s)", "compiled (s)", "ratio", "bar", "largest gradient difference")
    table.add_row(
        f"{min(eager):.4f}", f"{min(compiled):.4f}", f"{ratio:.3f}", f"{BAR:.2f}",
        f"{difference:.1e}",
    )  # fmt: skip
    Console().print(table)
    if min(eager) < SHORTEST_STEP_S:
        print(f"the step is shorter than {SHORTEST_STEP_S} s: make the model larger")
        return 1
    return int(ratio > BAR)


if __name__ == "__main__":
    sys.exit(main())
