"""Fine-tunes a tiny Llama under ``transformers.Trainer`` with a plan, adapters of peft included.

    torchrun --nproc-per-node 2 examples/trainer_finetune.py --plan ring_2
    python examples/trainer_finetune.py --plan none            # the Trainer alone, to compare

Everything but the class and its `plan` is the Trainer as it always is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from seqcomp import PlanError


class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of [length] bytes with labels; the beginning of each row is a prompt, not learned."""

    def __init__(self, rows: int, length: int) -> None:
        text = (Path(__file__).read_bytes() * (1 + rows * length // 4000))[: rows * length]
        self._ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(rows, length)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self._ids[index].clone()
        labels[: 1 + index % 7] = -100
        return {"input_ids": self._ids[index], "labels": labels}


def build_model(lora: bool) -> nn.Module:
    """A Llama over bytes; with `lora` only adapters learn."""
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
        )
    )
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    settings = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ],
        init_lora_weights="gaussian",
    )
    return get_peft_model(model, settings)


def arguments(out: str, **changes: Any) -> TrainingArguments:
    """The Trainer's own arguments; batch sizes are those of one data rank."""
    settings = {
        "output_dir": out,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
    }
    return TrainingArguments(**(settings | changes))


def build_trainer(
    plan: str | None, out: str, *, lora: bool, length: int, **changes: Any
) -> Trainer:
    """The Trainer, alone or under a plan."""
    model, args, data = build_model(lora), arguments(out, **changes), Lines(32, length)
    if plan is None:
        return Trainer(model, args, train_dataset=data, eval_dataset=data)
    from seqcomp.integrations.transformers import PlannedTrainer

    return PlannedTrainer(model, args, train_dataset=data, eval_dataset=data, plan=plan)


def main() -> None:
    """Fine-tunes as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", default="ring_2", help="a YAML file, a preset, or none")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-lora", dest="lora", action="store_false", help="all weights learn")
    parser.add_argument("--out", default="outputs")
    given = parser.parse_args()
    trainer = build_trainer(
        None if given.plan == "none" else given.plan,
        given.out,
        lora=given.lora,
        length=given.length,
        max_steps=given.steps,
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        for line in trainer.state.log_history:
            print(json.dumps(line))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except PlanError as error:
        raise SystemExit(str(error)) from None
