"""Trains a byte-level Llama with a plan of seqcomp as a real job would: packed documents, AdamW,
clipping, a checkpoint every few steps, SIGTERM, and restarts that resume.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/pretrain.py --folder runs/tiny
    torchrun --nproc-per-node 4 examples/pretrain.py --folder runs/tiny --plan usp_2x2

The second command goes on where the first one stopped, under another plan. `--recipe` names one of
the functions below; each returns everything that a run depends on. To see a restart,
`--kill-rank 1 --kill-step 5` kills a rank with SIGKILL in the first life of the job.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from launching import on_gpus, refuse
from torch import Tensor, nn
from torch.utils.data import DataLoader
from train_text import Config as Text
from train_text import build_model, load_text

import seqcomp
from seqcomp import PlanError
from seqcomp.training.data import BatchSampler, Row, pack, slice_of, slice_of_rank, stack
from seqcomp.training.failure import StopRequest, Watch
from seqcomp.training.job import Job
from seqcomp.training.launch import join
from seqcomp.training.nonfinite import NonFiniteWatch
from seqcomp.training.state import Checkpoints

# --- recipes ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Data:
    """Rows of `seq_len` bytes, packed with documents; `batch` rows in a step of all ranks."""

    seq_len: int
    batch: int
    documents: int
    workers: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW; the rate rises over `warmup` steps and stays."""

    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    max_norm: float = 1.0
    warmup: int = 4


@dataclass(frozen=True, kw_only=True)
class Saving:
    """`every` so many steps, the newest `keep`; `background`: while the job goes on."""

    every: int
    keep: int = 2
    background: bool = True


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a run depends on but the folder it works in."""

    plan: str
    steps: int
    model: Text
    data: Data
    optimizer: Optimizer = field(default_factory=Optimizer)
    saving: Saving
    find_non_finite: bool = False


def tiny() -> Recipe:
    """Two ranks, seconds on a laptop."""
    return Recipe(
        plan="ring_2",
        steps=12,
        model=Text(seq_len=256, layers=1, width=64, heads=4, kv_heads=2, text_bytes=2**16),
        data=Data(seq_len=256, batch=2, documents=64),
        saving=Saving(every=4),
    )


def small() -> Recipe:
    """Four ranks: ulysses inside, ring around."""
    return Recipe(
        plan="usp_2x2",
        steps=200,
        model=Text(seq_len=4096, layers=3),
        data=Data(seq_len=4096, batch=2, documents=400),
        saving=Saving(every=50),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {"tiny": tiny, "small": small}

# --- parts ------------------------------------------------------------------------------------


def documents(recipe: Recipe) -> list[Tensor]:
    """Pieces of text of very different lengths, each [n] bytes."""
    text = load_text(recipe.model)
    generator = torch.Generator().manual_seed(recipe.data.seed)
    # Lengths as they are in the wild: many short ones, some that fill rows.
    mean = recipe.data.seq_len / 2
    drawn = torch.empty(recipe.data.documents).exponential_(1 / mean, generator=generator)
    lengths = drawn.long() + 8
    return list(text[: int(lengths.sum())].split(lengths.tolist()))


def make_model(recipe: Recipe, device: torch.device) -> nn.Module:
    """The model under the plan, compiled for the calls of a step."""
    model = build_model(recipe.model, device)
    plan = seqcomp.load_plan(recipe.plan)
    plan = seqcomp.load_plan(plan.to_dict() | {"outputs": {"logits": "drop", **plan.outputs}})
    rows = recipe.data.batch // slice_of_rank(plan, dist.get_rank()).count
    blank = torch.zeros(rows, recipe.data.seq_len, dtype=torch.long, device=device)
    example = {"input_ids": blank, "labels": blank, "position_ids": blank}
    return seqcomp.parallelize(model, plan, example_inputs=example)


def make_job(recipe: Recipe, model: nn.Module, rows: list[Row]) -> tuple[Job, BatchSampler]:
    """Everything with state."""
    options, data = recipe.optimizer, recipe.data
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=options.warmup)
    sampler = BatchSampler(rows, data.batch, slice_of(model), seed=data.seed)
    return Job(model, optimizer, {"schedule": schedule, "sampler": sampler}), sampler


# --- the loop ---------------------------------------------------------------------------------


def train(
    recipe: Recipe, folder: Path, device: torch.device, before_step: Callable[[int], None]
) -> None:
    """Trains to the end, or until all ranks have agreed to stop; `before_step` may end this one."""
    rank = dist.get_rank()
    rows = list(pack(documents(recipe), recipe.data.seq_len))
    model = make_model(recipe, device)
    job, sampler = make_job(recipe, model, rows)
    checkpoints = Checkpoints(folder, keep=recipe.saving.keep)
    step = checkpoints.resume(job)
    say(rank, f"goes on after step {step}" if step else "starts anew")
    loader = DataLoader(
        rows, batch_sampler=sampler, collate_fn=stack, num_workers=recipe.data.workers
    )
    finding = NonFiniteWatch(model) if recipe.find_non_finite else nullcontext()
    with StopRequest(seqcomp.of(model).context.host) as stop, finding:
        for batch in sampler.feed(loader):
            if step >= recipe.steps:
                break
            step += 1
            before_step(step)
            job.optimizer.zero_grad()
            loss = model(**{name: x.to(device) for name, x in batch.items()}).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.max_norm)
            job.optimizer.step()
            job.stateful["schedule"].step()
            if isinstance(finding, NonFiniteWatch):
                finding.check(step)
            say(rank, f"step {step:4}   loss {loss.item():.6f}")
            stopping = stop.agreed()
            if stopping or step % recipe.saving.every == 0 or step == recipe.steps:
                checkpoints.save(job, step, background=recipe.saving.background)
            if stopping:
                say(rank, f"asked to stop: saved after step {step}")
                break
    checkpoints.close()
    seqcomp.of(model).close()


def say(rank: int, text: str) -> None:
    """A line of rank 0."""
    if rank == 0:
        print(text, flush=True)


# --- starting ---------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """One rank of a launch by torchrun."""
    options = parse(arguments)
    recipe: Recipe = RECIPES[options.recipe]()
    recipe = replace(
        recipe,
        plan=options.plan or recipe.plan,
        steps=options.steps or recipe.steps,
        saving=replace(recipe.saving, every=options.save_every or recipe.saving.every),
        find_non_finite=options.find_non_finite,
    )
    torch.set_num_threads(recipe.model.threads)
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpus(local_ranks) else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join("nccl" if device.type == "cuda" else "gloo")
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def before_step(step: int) -> None:
        if first_life and step == options.kill_step and dist.get_rank() == options.kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with Watch():
            train(recipe, options.folder, device, before_step)
    except PlanError as error:
        refuse(error)
    dist.destroy_process_group()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are")
    parser.add_argument("--recipe", choices=list(RECIPES), default="tiny")
    parser.add_argument("--plan", help="a YAML file, or a preset: ring_4")
    parser.add_argument("--steps", type=int, help="of the whole job")
    parser.add_argument("--save-every", type=int, help="steps between checkpoints")
    parser.add_argument("--find-non-finite", action="store_true", help="names the first NaN; slow")
    parser.add_argument("--kill-rank", type=int, default=-1, help="in the first life of the job,")
    parser.add_argument("--kill-step", type=int, default=-1, help="before this step")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
