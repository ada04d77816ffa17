"""What does it take to read a million tokens, and when is sequence parallelism worth it?

    python examples/long_prefill.py [--tokens 1000000] [--cluster a100] [--price 2.0]

Prefills of Llama 3 8B on one GPU, on 8-way tensor parallelism (a node) and with a ring over 4 and 8
such nodes, priced by the cost model: needs no GPU and imports no torch. Then the two questions that
decide: from which length on does a ring earn its nodes, and is reading everything worth it against
a shorter, retrieved context? `--json` prints what the tables show.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from seqcomp.cost.estimate import Estimate, estimate
from seqcomp.cost.named import load_shape
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.hardware.cluster import Cluster
from seqcomp.hardware.load import load_cluster
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve

RINGS = (1, 4, 8)
TENSOR = 8
LENGTHS = tuple(2**n * 1024 for n in range(3, 11))
EARNED = 0.75
"""Of a ring's nodes: the share of its ideal speed-up from which it counts as worth them."""


@dataclass(frozen=True)
class Prefill:
    """``seconds`` until the first token of one request; bytes of one GPU; ``waiting``: the share of
    the time in which it computes nothing."""

    plan: str
    gpus: int
    tokens: int
    seconds: float
    waiting: float
    cache_gb: float
    peak_gib: float
    fits: bool
    gpu_hours: float
    price: float


@dataclass(frozen=True)
class Answer:
    """Of a length: seconds on one node, and by nodes of a ring its speed-up and extra price."""

    tokens: int
    seconds: float
    speed_up: dict[int, float]
    dearer: dict[int, float]


@dataclass(frozen=True)
class Case:
    """What is asked about."""

    model: ModelShape
    cluster: Cluster
    gpu_hour_price: float

    def prefill(self, tokens: int, ring: int, tensor: int = TENSOR) -> Prefill:
        """``tokens`` are rounded down to what the ring's layout cuts evenly."""
        tokens -= tokens % (2 * ring * tensor)
        found = self._estimate(tokens, ring, tensor)
        cache = sum(row.bytes for row in found.memory if row.what == "keys and values")
        assert found.price is not None
        return Prefill(
            plan=_name(ring, tensor),
            gpus=ring * tensor,
            tokens=tokens,
            seconds=found.step_seconds,
            waiting=found.exposed_seconds / found.step_seconds,
            cache_gb=cache / 1e9,
            peak_gib=found.peak_bytes / 2**30,
            fits=found.fits,
            gpu_hours=found.gpu_hours,
            price=found.price,
        )

    def _estimate(self, tokens: int, ring: int, tensor: int) -> Estimate:
        mesh = {"ring": ring, "tensor": tensor}
        strategies = {"ring": {"layout": "zigzag"}, "megatron_sp": {}}
        plan = resolve(
            load_plan({"mesh": mesh, "strategies": strategies}), self.model.facts, seq_len=tokens
        )
        run = Run(tokens, mode="prefill")
        price = self.gpu_hour_price
        return estimate(plan, self.model, self.cluster, run, gpu_hour_price=price, advise=False)

    def plans(self, tokens: int) -> Iterator[Prefill]:
        """One GPU, a node, and rings of nodes."""
        yield self.prefill(tokens, 1, tensor=1)
        for ring in RINGS:
            yield self.prefill(tokens, ring)

    def answer(self, tokens: int) -> Answer:
        """Rings against one node."""
        node, *rings = (self.prefill(tokens, ring) for ring in RINGS)
        return Answer(
            tokens,
            node.seconds,
            {n: node.seconds / r.seconds for n, r in zip(RINGS[1:], rings, strict=True)},
            {n: r.price / node.price - 1 for n, r in zip(RINGS[1:], rings, strict=True)},
        )

    def longest_within(self, seconds: float) -> int:
        """Tokens that one node reads in that time, in steps of 1024."""
        steps = range(1, 4097)
        late = bisect_left(steps, True, key=lambda n: self._late(1024 * n, seconds))
        return 1024 * late

    def _late(self, tokens: int, seconds: float) -> bool:
        return self.prefill(tokens, 1).seconds > seconds


def worth_from(answers: Sequence[Answer], ring: int) -> int | None:
    """The shortest length from which a ring has `EARNED` of its ideal speed-up; None: none has."""
    enough = [a.tokens for a in answers if a.speed_up[ring] >= EARNED * ring]
    return min(enough, default=None)


def _name(ring: int, tensor: int) -> str:
    if tensor == 1:
        return "1 GPU"
    return f"TP{tensor}" if ring == 1 else f"TP{tensor} x SP{ring}"


def plans_table(plans: Sequence[Prefill]) -> Table:
    titles = ("plan", "GPUs", "seconds", "waiting", "KV a GPU", "peak a GPU", "GPU hours", "price")
    table = Table(*titles, title=f"{plans[-1].tokens:,} tokens")
    for p in plans:
        peak = f"{p.peak_gib:.1f} GiB" + ("" if p.fits else ", does not fit")
        kept, cost = f"{p.cache_gb:.2f} GB", f"{p.price:.3g}"
        cells = (f"{p.seconds:.1f}", f"{p.waiting:.1%}", kept, peak, f"{p.gpu_hours:.3f}", cost)
        table.add_row(p.plan, str(p.gpus), *cells)
    return table


def lengths_table(answers: Sequence[Answer]) -> Table:
    table = Table("tokens", f"TP{TENSOR} (s)", title="a ring of nodes against one node")
    for ring in RINGS[1:]:
        table.add_column(f"SP{ring}: faster")
        table.add_column("dearer")
    for a in answers:
        cells = (f"{f(a, ring)}" for ring in RINGS[1:] for f in (_faster, _dearer))
        table.add_row(f"{a.tokens:,}", f"{a.seconds:.2f}", *cells)
    return table


def _faster(answer: Answer, ring: int) -> str:
    return f"{answer.speed_up[ring]:.2f} x"


def _dearer(answer: Answer, ring: int) -> str:
    return f"{answer.dearer[ring]:+.0%}"


def reasons(
    case: Case, plans: Sequence[Prefill], answers: Sequence[Answer], short: Prefill, patience: float
) -> Iterator[str]:
    """The conclusions that the figures allow."""
    alone, node, *rings = plans
    if not alone.fits:
        yield (
            f"One GPU: no. Keys and values alone are {alone.cache_gb:.0f} GB, "
            f"{case.cluster.device.name} has {case.cluster.device.memory / 1e9:.0f} GB."
        )
    for ring, found in zip(RINGS[1:], rings, strict=True):
        gain = node.seconds / found.seconds
        yield (
            f"{found.plan}: {gain:.2f} x faster than {node.plan} on {ring} x the GPUs, "
            f"{gain / ring:.0%} of ideal; the request costs {found.price / node.price - 1:+.0%}."
        )
        start = worth_from(answers, ring)
        since = f"from {start:,} tokens on" if start else "at none of these lengths"
        yield f"  It has {EARNED:.0%} of its ideal speed-up {since}."
    longest = case.longest_within(patience)
    if longest:
        yield (
            f"Up to {longest:,} tokens {node.plan} has the first token within {patience:g} s, at "
            f"the lowest price: no ring is needed for its speed."
        )
    if all(p.fits for p in (node, *rings)):
        yield "A ring buys time and room, not price: for tokens a GPU take the smallest plan."
    best = min((p for p in plans if p.fits), key=lambda p: p.seconds, default=None)
    if best is None:
        return
    times = best.price / short.price
    yield (
        f"A retrieved context of {short.tokens:,} tokens takes {short.seconds:.2f} s on "
        f"{short.plan} and costs {short.price:.2g}; all tokens on {best.plan} cost {times:,.0f} x "
        f"as much. Read everything where retrieval loses the answer, or where its keys and values "
        f"are kept for more than {times:,.0f} requests."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--retrieved", type=int, default=16_384, help="tokens of a shorter context")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--cluster", default="a100", help="a known one, or a cluster file")
    parser.add_argument("--price", type=float, default=2.0, help="of one GPU for one hour")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds to the first token")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    case = Case(load_shape(args.model), load_cluster(args.cluster), args.price)
    plans = [*case.plans(args.tokens)]
    answers = [case.answer(length) for length in LENGTHS]
    short = case.prefill(args.retrieved, 1)
    why = [*reasons(case, plans, answers, short, args.patience)]
    if args.json:
        found = {
            "plans": [asdict(p) for p in plans],
            "lengths": [asdict(a) for a in answers],
            "retrieved": asdict(short),
            "reasons": why,
        }
        print(json.dumps(found, indent=2))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print(plans_table(plans), lengths_table(answers), *why, sep="\n", markup=False)


if __name__ == "__main__":
    main()
