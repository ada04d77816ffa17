"""What the ranks of `test_trainer` run: `trainer_ranks.py FOLDER alone|plans`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from trainer_finetune import build_trainer

import seqcomp

SETTINGS: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.5, "length": 32}

# A small epsilon makes a sign of each gradient, of noise too.
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2, "adam_epsilon": 1e-3}
SAVES = {"save_strategy": "steps", "save_steps": 2}
# The best is the one whose loss is the largest: not the last.
BEST = SAVES | {
    "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
    "greater_is_better": True,
}  # fmt: skip

EVALUATED = ("full", "full.ring", "full.data", "full.own")


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The model's own loss, computed on its logits."""
    logits = outputs.logits[:, :-1].float().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss / (
        (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
    )


def run(folder: Path, name: str, plan: Any, *, lora: bool = False, **changes: Any) -> Any:
    """Trains; rank 0 leaves the log, the evaluation and the weights in `folder`."""
    own_loss, resume = changes.pop("own_loss", False), changes.pop("resume", None)
    trainer = build_trainer(plan, str(folder / name), lora=lora, **(SETTINGS | changes))
    if own_loss:
        trainer.compute_loss_func = summed
    trainer.train(resume_from_checkpoint=resume)
    if plan is not None:
        _check_products(trainer, torch.bfloat16 if changes.get("bf16") else torch.float32)
    seen = {"log": trainer.state.log_history}
    if name in EVALUATED:
        seen["eval"] = trainer.evaluate()["eval_loss"]
    whole = {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in trainer.model.state_dict().items()
    }
    trainer.save_model(str(folder / f"{name}.saved"))
    if trainer.is_world_process_zero():
        (folder / f"{name}.json").write_text(json.dumps(seen))
        torch.save({key: value.clone() for key, value in whole.items()}, folder / f"{name}.pt")
    return trainer


def _check_products(trainer: Any, dtype: torch.dtype) -> None:
    """In which dtype the model's linears are computed."""
    model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
    program = seqcomp.of(model).programs[-1]
    linears = [n for n in program.flat.nodes if str(n.target) == "aten.linear.default"]
    assert {n.meta["val"].dtype for n in linears} == {dtype}


def main() -> None:
    """The Trainer alone, or under every plan on the two ranks of one launch."""
    folder, alone = Path(sys.argv[1]), sys.argv[2] == "alone"
    torch.set_num_threads(1)
    if alone:
        run(folder, "full", None)
        run(folder, "bf16", None, bf16=True)
        run(folder, "adam", None, **ADAM)
        run(folder, "best", None, **ADAM, **BEST)
        run(folder, "lora", None, lora=True, **ADAM)
        return
    run(folder, "lora.ulysses", "ulysses_2", lora=True, **ADAM, **SAVES)
    # One goes on from what another plan saved, whose parameters were divided otherwise.
    half = str(folder / "lora.ulysses" / "checkpoint-2")
    run(folder, "lora.fsdp", "ring_2+fsdp", lora=True, **ADAM, resume=half)
    run(folder, "adam.fsdp", "ring_2+fsdp", **ADAM, **SAVES)
    half = str(folder / "adam.fsdp" / "checkpoint-2")
    run(folder, "adam.megatron", "megatron_sp_2", **ADAM, resume=half)
    run(folder, "best.fsdp", "ring_2+fsdp", **ADAM, **BEST)
    run(folder, "bf16.megatron", "megatron_sp_2", bf16=True)
    run(folder, "full.ring", "ring_2", **SAVES)
    run(folder, "full.resumed", "ring_2", resume=str(folder / "full.ring" / "checkpoint-2"))
    halves = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 4}
    run(folder, "full.data", "data_2", **halves)
    run(folder, "full.own", "data_2", own_loss=True, **halves)
    mean = {"mesh": {"data": 2}, "strategies": {"data": {"gradients": "mean"}}}
    run(folder, "full.mean", mean, own_loss=True, **halves)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
