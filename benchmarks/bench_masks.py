"""CPU time of masked attention against full causal attention, beside the ratio of their areas.

    python benchmarks/bench_masks.py [--length 16384] [--ranks 2]

Ranks are threads of this process with one thread each for torch; the seconds are those of all
ranks, forward and backward, the making of the tiles included.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from seqcomp.layout.masks import Band, Causal, Mask
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.attention import AttentionPlan, attention
from seqcomp.runtime.attention.pair_mask import Apply, Leaf, PairMask, Position
from seqcomp.runtime.attention.tiling import DataTiling
from seqcomp.runtime.threads import run_ranks

aten = torch.ops.aten
GAP = Apply(aten.sub.Tensor, (Position("query"), Position("key")))
CAUSAL = Apply(aten.ge.Scalar, (GAP, 0))


def seconds(mask: Mask | PairMask, leaves: list[torch.Tensor], args: Any) -> float:
    layout = SequenceLayout("zigzag", args.ranks)
    torch.manual_seed(0)
    shape = (1, args.heads, args.length // args.ranks, args.head_dim)
    whole = [torch.randn(shape) for _ in range(3)]

    def fn(context: Any) -> float:
        inputs = [x.clone().requires_grad_() for x in whole]
        start = time.thread_time()
        tiling = None
        if isinstance(mask, PairMask):
            tiling = DataTiling(mask, leaves, layout, args.length, torch.device("cpu"))
        plan = AttentionPlan(mask if isinstance(mask, Mask) else None, layout)
        out = attention(*inputs, plan, tiling, ring=context.comm(("ring",)))
        out.sum().backward()
        return time.thread_time() - start

    return min(sum(run_ranks(fn, {"ring": args.ranks}, timeout=600)) for _ in range(args.repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    n = args.length
    whole = n * (n + 1) // 2
    base = seconds(Causal(), [], args)
    print(f"causal: {base:.2f} s")
    for width in (n // 16, n // 4):
        mask = Band(0, width - 1)
        area = width * n - width * (width - 1) // 2
        _show(f"window of {width}", seconds(mask, [], args) / base, area / whole)
    for each in (n // 8, n // 2):
        number = torch.arange(n) // each
        leaves = [number.view(1, 1, -1, 1), number.view(1, 1, 1, -1)]
        same = Apply(aten.eq.Tensor, (Leaf(0), Leaf(1)))
        mask = PairMask(Apply(aten.logical_and.default, (CAUSAL, same)))
        area = n // each * each * (each + 1) // 2
        _show(f"documents of {each}", seconds(mask, leaves, args) / base, area / whole)


def _show(name: str, taken: float, area: float) -> None:
    print(f"{name}: time {taken:.3f}, area {area:.3f} of causal, {taken / area:.2f} apart")


if __name__ == "__main__":
    main()
