"""CPU time of masked attention against full causal attention, beside the ratio of their areas.

    python benchmarks/bench_masks.py [--length 16384] [--ranks 2]

Ranks are threads of this process with one thread each for torch; the seconds are those of all
ranks, forward and backward, the making of the tiles included. Masks take turns, so that what else
the machine does meets all of them; the least of each counts. Exits with 1 where a mask's time is
more than 1.25 times its share of the area.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
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
BAR = 1.25
CAUSAL = Apply(aten.ge.Scalar, (GAP, 0))


@dataclass(frozen=True)
class Case:
    """A mask, its inputs and how many pairs it shows."""

    name: str
    mask: Mask | PairMask
    leaves: list[torch.Tensor]
    area: int


def seconds(mask: Mask | PairMask, leaves: list[torch.Tensor], args: Any) -> tuple[float, float]:
    """Of forward and of backward."""
    layout = SequenceLayout("zigzag", args.ranks)
    torch.manual_seed(0)
    # As they come from projections: the heads of a token side by side.
    shape = (1, args.length // args.ranks, args.heads, args.head_dim)
    dtype = getattr(torch, args.dtype)
    *whole, cotangent = [torch.randn(shape, dtype=dtype).transpose(1, 2) for _ in range(4)]

    def fn(context: Any) -> tuple[float, float]:
        inputs = [x.clone().requires_grad_() for x in whole]
        start = time.thread_time()
        tiling = None
        if isinstance(mask, PairMask):
            tiling = DataTiling(mask, leaves, layout, args.length, torch.device("cpu"))
        plan = AttentionPlan(mask if isinstance(mask, Mask) else None, layout)
        out = attention(*inputs, plan, tiling, ring=context.comm(("ring",)))
        middle = time.thread_time()
        out.backward(cotangent)
        return middle - start, time.thread_time() - middle

    forward, backward = zip(*run_ranks(fn, {"ring": args.ranks}, timeout=600), strict=True)
    return sum(forward), sum(backward)


def window(length: int, width: int) -> Case:
    area = width * length - width * (width - 1) // 2
    return Case(f"window of {width}", Band(0, width - 1), [], area)


def documents(length: int, each: int) -> Case:
    number = torch.arange(length) // each
    leaves = [number.view(1, 1, -1, 1), number.view(1, 1, 1, -1)]
    same = Apply(aten.eq.Tensor, (Leaf(0), Leaf(1)))
    mask = PairMask(Apply(aten.logical_and.default, (CAUSAL, same)))
    return Case(f"documents of {each}", mask, leaves, length * (each + 1) // 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--windows", type=int, nargs="*", help="widths; 1/16 and 1/4 of the length")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    n = args.length
    cases = [
        Case("causal", Causal(), [], n * (n + 1) // 2),
        *(window(n, width) for width in args.windows or (n // 16, n // 4)),
        documents(n, n // 8),
    ]
    taken: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    for _ in range(args.repeats):
        for case in cases:
            taken[case.name].append(seconds(case.mask, case.leaves, args))
    whole = min(map(sum, taken["causal"]))
    missed = False
    for case in cases:
        least = min(map(sum, taken[case.name]))
        forward, backward = (min(x) for x in zip(*taken[case.name], strict=True))
        ratio, area = least / whole, case.area / cases[0].area
        missed |= ratio / area > BAR
        print(
            f"{case.name}: {least:.2f} s (forward {forward:.2f}, backward {backward:.2f}), time "
            f"{ratio:.3f}, area {area:.3f} of causal, {ratio / area:.2f} apart"
        )
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
