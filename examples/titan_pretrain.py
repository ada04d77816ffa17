"""torchtitan's own Trainer with a plan of seqcomp: recipes as functions that return its config.

    torchrun --nproc-per-node 2 examples/titan_pretrain.py --recipe pretrain --plan ring_2
    torchrun --nproc-per-node 8 examples/titan_pretrain.py --recipe long_context \\
        --plan "usp_4x2" --seq-len 131072

Without a GPU it runs on the CPU, with torchtitan's causal attention; with GPUs on FlexAttention,
packed documents apart. `--plan none` is torchtitan alone, on one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from titan_on_cpu import import_torchtitan

import_torchtitan()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from titan_data import ByteTokenizer, LibraryText  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.config import DebugConfig, TrainingConfig  # noqa: E402
from torchtitan.models import llama3, qwen3  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    BaseAttention,
    ScaledDotProductAttention,
)
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from seqcomp import PlanError  # noqa: E402
from seqcomp.integrations.torchtitan import with_plan  # noqa: E402

MODELS = {"llama3": llama3, "qwen3": qwen3}


def model_spec(model: str, flavor: str, layers: int | None) -> ModelSpec:
    """torchtitan's spec; on the CPU with its SDPA, as its FlexAttention has no backward there."""
    spec: ModelSpec = MODELS[model].model_registry(flavor, attn_backend="flex")
    if layers is not None:
        spec.model.layers = spec.model.layers[:layers]
    if not torch.accelerator.is_available():
        for _, attention, _, _ in spec.model.traverse(BaseAttention.Config):
            attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def pretrain(
    plan: str | None,
    *,
    model: str = "llama3",
    flavor: str = "debugmodel",
    layers: int | None = None,
    seq_len: int = 2048,
    steps: int = 10,
    local_batch_size: int = 2,
    lr: float = 8e-4,
    seed: int = 0,
    out: str = "outputs",
) -> Trainer.Config:
    """From new weights on short rows of packed text."""
    config = Trainer.Config(
        model_spec=model_spec(model, flavor, layers),
        loss=CrossEntropyLoss.Config(),
        tokenizer=ByteTokenizer.Config(),
        # Packed documents are a mask of FlexAttention; SDPA does not see them.
        dataloader=LibraryText.Config(packed=torch.accelerator.is_available()),
        optimizer=default_adamw(lr=lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8),
        training=TrainingConfig(
            local_batch_size=local_batch_size,
            seq_len=seq_len,
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=False, interval=500),
        activation_checkpoint=None,
        debug=DebugConfig(seed=seed),
        dump_folder=out,
    )
    if plan is None:
        # The same Trainer on one process, without FSDP, which has nothing to do there.
        config.model_spec = dataclasses.replace(
            config.model_spec, parallelize_fn=lambda model, **_: model
        )
        return config
    return with_plan(config, plan)


def long_context(
    plan: str | None, *, checkpoint: str | None = None, **settings: Any
) -> Trainer.Config:
    """Goes on from the weights of a torchtitan checkpoint with long rows of one text each: one
    row at a time, a small constant learning rate.
    """
    config = pretrain(plan, **({"seq_len": 32768, "local_batch_size": 1, "lr": 2e-5} | settings))
    config.dataloader = LibraryText.Config(packed=False, text_bytes=2**23)
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.0)
    if checkpoint is not None:
        config.checkpoint.enable = True
        config.checkpoint.initial_load_path = checkpoint
    return config


RECIPES = {"pretrain": pretrain, "long_context": long_context}


class LossFile:
    """Appends step and loss of what the Trainer logs to a file, as JSON, from rank 0."""

    def __init__(self, file: Path, processor: MetricsProcessor) -> None:
        self._file, self._log = file, processor.log
        processor.log = self

    def __call__(self, step: int, loss: float, *rest: Any, **more: Any) -> None:
        if dist.get_rank() == 0:
            with self._file.open("a") as file:
                print(json.dumps({"step": step, "loss": loss, "grad_norm": rest[1]}), file=file)
        self._log(step, loss, *rest, **more)


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=RECIPES, default="pretrain")
    parser.add_argument("--plan", default="ring_2", help="a YAML file, a preset, or none")
    parser.add_argument("--model", choices=MODELS, default="llama3")
    parser.add_argument("--flavor", default="debugmodel")
    parser.add_argument("--layers", type=int, help="only the first ones")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--local-batch-size", type=int, help="rows of one data rank")
    parser.add_argument("--checkpoint", help="long_context: a torchtitan checkpoint to go on from")
    parser.add_argument("--save-every", type=int, help="steps between checkpoints")
    parser.add_argument("--losses", type=Path, help="a file for the losses, one JSON a line")
    parser.add_argument("--out", default="outputs")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    recipe, plan, losses = (
        RECIPES[given.pop("recipe")],
        given.pop("plan"),
        given.pop("losses", None),
    )
    save_every = given.pop("save_every", None)
    init_logger()
    if not torch.accelerator.is_available():
        torch.set_num_threads(1)
    config = recipe(None if plan == "none" else plan, **given)
    if save_every is not None:
        config.checkpoint.enable, config.checkpoint.interval = True, save_every
        config.checkpoint.last_save_model_only = False
    trainer = config.build()
    if losses is not None:
        LossFile(losses, trainer.metrics_processor)
    trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except PlanError as error:
        raise SystemExit(str(error)) from None
