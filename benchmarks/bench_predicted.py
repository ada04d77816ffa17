"""Predicted against measured step times of real gloo runs of a small Llama on this machine.

    python benchmarks/bench_predicted.py [--ranks 2 4] [--steps 5] [--profile 2=two.yaml]

For each number of ranks the machine is measured first with as many (as `seqcomp bench` does): ranks
share cores, so a profile holds for the number it was taken with. Then a training step (forward,
backward, AdamW) under each plan, one thread a rank, the median of the slowest rank's wall time,
beside what `seqcomp estimate` predicts from that profile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from seqcomp.cost.estimate import Estimate, estimate
from seqcomp.cost.run import Run
from seqcomp.hardware.cluster import Cluster
from seqcomp.hardware.load import load_cluster
from seqcomp.integrations.sample import SampleInputs, SampleModel
from seqcomp.integrations.shapes import model_shape
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve
from seqcomp.profiling.run import profile_on
from seqcomp.profiling.sizes import CPU
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.gloo import on_processes

MODEL = (
    "hf:LlamaForCausalLM?hidden_size=512&intermediate_size=1408&num_hidden_layers=2"
    "&num_attention_heads=8&num_key_value_heads=4&vocab_size=2048"
)
PLANS = {
    2: ("ring_2", "ulysses_2", "megatron_sp_2"),
    4: ("ring_4", "ulysses_4", "usp_2x2", "megatron_sp_4", "ring_2+megatron_sp_2"),
}


def step_ns(
    model: torch.nn.Module, context: RankContext, inputs: Mapping[str, Any], *, steps: int
) -> list[int]:
    """Of each step, the slowest rank's nanoseconds."""
    optimizer = torch.optim.AdamW(model.parameters())
    taken = []
    for _ in range(steps + 1):
        context.host.all_max([0])
        start = time.perf_counter_ns()
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter_ns() - start)
    return context.host.all_max(taken[1:])  # the first one compiles


def measured(name: str, args: argparse.Namespace) -> float:
    """Seconds of a step."""
    # The model's own rows of logits stay where they are: what is timed is training.
    plan = resolve(load_plan(_plan(name)))
    ranks = on_processes(
        SampleModel(args.model, "float32", "train"),
        plan,
        partial(step_ns, steps=args.steps),
        inputs_fn=SampleInputs(args.model, 1, args.length),
    )
    return statistics.median(ranks[0]) / 1e9


def predicted(name: str, args: argparse.Namespace, cluster: Cluster) -> Estimate:
    shape = model_shape(args.model)
    plan = resolve(load_plan(_plan(name)), shape.facts, seq_len=args.length)
    return estimate(plan, shape, cluster, Run(args.length, dtype="fp32"), advise=False)


def _plan(name: str) -> dict[str, Any]:
    return {**load_plan(name).model_dump(exclude_unset=True), "outputs": {"logits": "drop"}}


def profile(ranks: int, console: Console) -> Cluster:
    """This machine, as so many ranks see it."""
    with console.status(f"profile of {ranks} ranks") as status, TemporaryDirectory() as folder:
        tell = partial(_tell, status, ranks)
        path = Path(folder) / "profile.yaml"
        path.write_text(yaml.safe_dump(profile_on(ranks, CPU, ("fp32",), tell)))
        return load_cluster(path)


def _tell(status: Any, ranks: int, what: str) -> None:
    status.update(f"profile of {ranks} ranks: {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=sorted(PLANS), choices=PLANS)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--plans", nargs="*", default=[], help="of as many ranks as --ranks")
    parser.add_argument("--profile", nargs="*", default=[], metavar="RANKS=FILE")
    args = parser.parse_args()
    files = dict(item.split("=", 1) for item in args.profile)
    console = Console(stderr=True)
    table = Table("ranks", "plan", "predicted (s)", "of it waiting", "measured (s)", "error")
    errors = []
    for ranks in args.ranks:
        known = files.get(str(ranks))
        cluster = load_cluster(known) if known else profile(ranks, console)
        for name in args.plans or PLANS[ranks]:
            with console.status(f"{name}: {args.steps} steps"):
                found, seconds = predicted(name, args, cluster), measured(name, args)
            errors.append(found.step_seconds / seconds - 1)
            console.print(f"{name}: {found.step_seconds:.3f} s predicted, {seconds:.3f} s measured")
            table.add_row(
                str(ranks),
                name,
                f"{found.step_seconds:.3f}",
                f"{found.exposed_seconds / found.step_seconds:.0%}",
                f"{seconds:.3f}",
                f"{errors[-1]:+.0%}",
            )
    table.caption = f"median of absolute errors {statistics.median(map(abs, errors)):.0%}"
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    main()
