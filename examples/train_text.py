"""Trains a byte-level Llama on the text of the Python standard library with a plan of seqcomp,
beside one process that does the same without it.

    python examples/train_text.py                         # starts the ranks of the plan itself
    torchrun --nproc-per-node 4 examples/train_text.py --plan plans/usp_2x2.yaml

Both see the same data, seed and optimizer, so the two loss curves should be one. With a GPU for
each rank the ranks use NCCL and CUDA, else gloo and the CPU. The one process runs before the
ranks, not beside them. Every process computes with one CPU thread, as each would with one GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import reporting
import torch
import torch.distributed as dist
from launching import free_port, on_gpus, refuse, set_up_as_torchrun, start_processes
from measuring import (
    Run,
    Sent,
    gradient_error,
    gradients_of,
    peak_memory,
    saved_activations,
    sent_bytes,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import seqcomp
from seqcomp import Plan, PlanError

PLANS = Path(__file__).resolve().parents[1] / "plans"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The recipe. Lengths are in bytes of text; `sequences` is the batch of one data rank."""

    plan: str = str(PLANS / "usp_2x2.yaml")
    steps: int = 24
    seq_len: int = 4096
    sequences: int = 1
    layers: int = 3
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    learning_rate: float = 3e-3
    seed: int = 0
    text_bytes: int = 8 * 2**20
    threads: int = 1
    reference: bool = True
    out: Path = Path("loss.png")

    @property
    def time_limit_s(self) -> float:
        """When a run is given up: far beyond the need of a slow machine, for hangs only."""
        return 300.0 + 60.0 * self.steps


# --- the recipe -------------------------------------------------------------------------------


def load_text(config: Config) -> Tensor:
    """Bytes [N] of the standard library's modules, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    # encodings are tables, not text
    left_out = {"site-packages", "dist-packages", "test", "tests", "encodings"}
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= config.text_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def batches(config: Config, slices: int) -> Iterator[Tensor]:
    """Ids [B, S] of the whole batch of each step, from random places of the text."""
    text = load_text(config)
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        number = slices * config.sequences
        starts = torch.randint(len(text) - config.seq_len, (number,), generator=generator)
        yield torch.stack([text[at : at + config.seq_len] for at in starts.tolist()]).long()


def build_model(config: Config, device: torch.device) -> nn.Module:
    """An unmodified Llama of transformers over bytes; every process draws the same weights."""
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=config.width,
            intermediate_size=2 * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.seq_len,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )
    return model.to(device)


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Plain AdamW: after backward every rank has the gradients of the whole batch."""
    return torch.optim.AdamW(model.parameters(), lr=config.learning_rate)


def read_plan(config: Config, world_size: int | None = None) -> Plan:
    """The plan, checked against the model and the length, with the logits, which nobody reads,
    dropped.

    Raises PlanError with everything that is wrong.
    """
    plan = seqcomp.load_plan(config.plan)
    model = build_model(config, torch.device("cpu"))
    found = seqcomp.validate(plan, model, world_size=world_size, seq_len=config.seq_len)
    errors = [item for item in found if item.severity == "error"]
    if errors:
        raise PlanError(errors)
    return seqcomp.load_plan(plan.to_dict() | {"outputs": {"logits": "drop", **plan.outputs}})


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> float:
    """One step on ids [b, S]; the loss is the mean over all predicted bytes of the whole batch."""
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss  # the model shifts the labels
    loss.backward()
    optimizer.step()
    return loss.item()


def train(
    config: Config,
    model: nn.Module,
    data: Iterable[Tensor],
    *,
    name: str,
    after_first: Callable[[], None],
    beside: Run | None = None,
    quiet: bool = False,
) -> Run:
    """Trains on ids [b, S] of `data` and measures; `after_first` finds the first gradients."""
    device = next(model.parameters()).device
    optimizer = build_optimizer(config, model)
    run = Run(name)
    with reporting.progress(run, config.steps, beside, quiet=quiet) as shown:
        for step, ids in enumerate(data):
            start = time.perf_counter()
            with saved_activations(run, model) if step == 0 else nullcontext():
                run.losses.append(train_step(model, optimizer, ids.to(device)))
            run.seconds.append(time.perf_counter() - start)
            if step == 0:
                after_first()
            shown()
    run.peak_bytes = peak_memory(device)
    return run


# --- one process ------------------------------------------------------------------------------


def one_process(_: int, config: Config, slices: int, kind: str, file: Path) -> None:
    """The same training without seqcomp; leaves its measurements and first gradients in `file`."""
    torch.set_num_threads(config.threads)
    model = build_model(config, torch.device(kind))
    first: dict[str, Tensor] = {}
    run = train(
        config,
        model,
        batches(config, slices),
        name="one process",
        after_first=lambda: first.update(gradients_of(model)),
    )
    torch.save((vars(run), first), file)


def run_one_process(config: Config, plan: Plan, local_ranks: int, folder: str) -> Path | None:
    """`one_process` on the device of rank 0, in a process of its own; its file."""
    if not config.reference:
        return None
    kind = "cuda" if on_gpus(local_ranks) else "cpu"
    file = Path(folder) / "one_process.pt"
    start_processes(one_process, 1, config.time_limit_s, config, slices_of(plan), kind, file)
    return file


# --- the ranks of the plan --------------------------------------------------------------------


def run_rank(config: Config, plan: Plan, one_process_file: Path | None) -> None:
    """This rank's part; rank 0 knows what the one process found, and reports.

    Finds its place in the variables that torchrun sets.
    """
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(config.threads)
    device = torch.device("cuda", local_rank) if on_gpus(local_ranks) else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    model, compile_s = parallel_model(config, plan, mesh, device)
    beside, wanted = read_one_process(one_process_file)
    errors: list[float] = []
    sent: list[Sent] = []

    def after_first() -> None:
        sent.extend(sent_bytes(model, config.sequences, config.seq_len))
        if config.reference:
            errors.append(gradient_error(model, wanted))

    slices = slices_of(plan)
    mine = slice_of(plan, mesh)
    run = train(
        config,
        model,
        (ids.chunk(slices)[mine] for ids in batches(config, slices)),
        name="one rank" if mesh.size() == 1 else f"{mesh.size()} ranks",
        after_first=after_first,
        beside=beside,
        quiet=rank != 0,
    )
    run.compile_s = compile_s
    runs: list[Any] = [None] * mesh.size()
    dist.all_gather_object(runs, run)
    if rank == 0:
        reporting.summary(beside, runs, slices * config.sequences * config.seq_len, errors)
        reporting.sent(sent)
        reporting.curves(config.out, run, beside)
    seqcomp.of(model).close()


def parallel_model(
    config: Config, plan: Plan, mesh: DeviceMesh, device: torch.device
) -> tuple[nn.Module, float]:
    """The model under the plan, and the seconds that this took.

    With an example call it is compiled here; without one the first step would do it.
    """
    ids = torch.zeros(config.sequences, config.seq_len, dtype=torch.long, device=device)
    model = build_model(config, device)
    start = time.perf_counter()
    model = seqcomp.parallelize(
        model, plan, mesh=mesh, example_inputs={"input_ids": ids, "labels": ids}
    )
    return model, time.perf_counter() - start


def read_one_process(file: Path | None) -> tuple[Run | None, dict[str, Tensor]]:
    """What `one_process` left."""
    if file is None:
        return None, {}
    fields, gradients = torch.load(file)
    return Run(**fields), gradients


def slices_of(plan: Plan) -> int:
    """Into how many slices the plan cuts the batch."""
    return plan.mesh[plan.strategies.data.axis] if plan.strategies.data else 1


def slice_of(plan: Plan, mesh: DeviceMesh) -> int:
    """Which of them is this rank's; all ranks of a sequence group have the same."""
    return mesh.get_local_rank(plan.strategies.data.axis) if plan.strategies.data else 0


# --- starting ---------------------------------------------------------------------------------


def join_ranks(config: Config, plan: Plan, one_process_file: Path | None) -> None:
    """`run_rank` inside a process group. A PlanError, the same on all ranks, is shown once."""
    backend = "nccl" if on_gpus(int(os.environ["LOCAL_WORLD_SIZE"])) else "gloo"
    # Under torchrun the other ranks wait here for the one process that rank 0 runs.
    dist.init_process_group(backend, timeout=timedelta(seconds=config.time_limit_s))
    try:
        run_rank(config, plan, one_process_file)
    finally:
        dist.destroy_process_group()


def spawned_rank(
    rank: int, config: Config, plan: Plan, world: int, port: int, file: Path | None
) -> None:
    """One rank of those that this script starts."""
    set_up_as_torchrun(rank, world, port)
    try:
        join_ranks(config, plan, file)
    except PlanError as error:
        refuse(error)


def under_torchrun(config: Config) -> None:
    """One rank of a launch by torchrun."""
    plan = read_plan(config, int(os.environ["WORLD_SIZE"]))
    with tempfile.TemporaryDirectory() as folder:
        file = None
        if os.environ["RANK"] == "0":
            file = run_one_process(config, plan, int(os.environ["LOCAL_WORLD_SIZE"]), folder)
        join_ranks(config, plan, file)


def on_this_machine(config: Config) -> None:
    """The one process, then all ranks of the plan, started here."""
    plan = read_plan(config)
    world = math.prod(plan.mesh.values())
    with tempfile.TemporaryDirectory() as folder:
        file = run_one_process(config, plan, world, folder)
        arguments = (config, plan, world, free_port(), file)
        start_processes(spawned_rank, world, config.time_limit_s, *arguments)


def count(text: str) -> int:
    """A number of the command line that is at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse(arguments: list[str] | None = None) -> Config:
    """The config that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Config()
    parser.add_argument("--plan", default=defaults.plan, help="a YAML file, or a preset: ring_4")
    parser.add_argument("--steps", type=count, default=defaults.steps)
    parser.add_argument("--seq-len", type=count, default=defaults.seq_len, help="bytes of text")
    parser.add_argument("--layers", type=count, default=defaults.layers)
    parser.add_argument("--out", type=Path, default=defaults.out, help="where the picture goes")
    parser.add_argument(
        "--no-reference", dest="reference", action="store_false",
        help="leave the one process out",
    )  # fmt: skip
    return Config(**vars(parser.parse_args(arguments)))


def main() -> None:
    """Runs the demo as the command line says."""
    config = parse()
    try:
        if dist.is_torchelastic_launched():
            under_torchrun(config)
        else:
            on_this_machine(config)
    except PlanError as error:
        refuse(error)


if __name__ == "__main__":
    main()
