"""What the ranks of `test_titan_training` run under torchrun: `titan_ranks.py FOLDER PLANS...`.

Writes what the Trainer logged, step -> [loss, norm of the gradients], per run into FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from titan_pretrain import pretrain
from torchtitan.distributed.activation_checkpoint import FullAC

import seqcomp

SMALL: dict[str, Any] = {"layers": 2, "seq_len": 32, "steps": 3}


def run(folder: Path, name: str, plan: str | None, rows: int, load: int | None = None) -> None:
    """Trains three steps; `load` goes on after a step of the run that saved its checkpoints."""
    config = pretrain(plan, **SMALL, local_batch_size=rows, out=str(folder / "titan"))
    if name == "data":
        config.compile.enable, config.compile.backend = True, "aot_eager"
        config.compile.components = ["model"]
    if name == "ring":
        config.activation_checkpoint = FullAC.Config()
    saves = name == "ring"
    if saves or load is not None:
        config.checkpoint.enable, config.checkpoint.interval = True, 1
        config.checkpoint.last_save_model_only = False
        config.checkpoint.load_only = not saves
        config.checkpoint.load_step = -1 if load is None else load
    trainer = config.build()
    logged: dict[int, tuple[float, float]] = {}
    log = trainer.metrics_processor.log

    def keep(step: int, loss: float, highest: float, norm: float, **more: Any) -> None:
        logged[step] = (loss, norm)
        log(step, loss, highest, norm, **more)

    trainer.metrics_processor.log = keep
    trainer.train()
    if plan is not None:
        (model,) = trainer.model_parts
        rows_of = [row.what for row in seqcomp.of(model).report().memory]
        assert rows_of == (["checkpoint: block"] if name == "ring" else [])
        compiled = [block._compiled_call_impl is not None for block in model.layers.values()]
        assert compiled == [name == "data"] * 2
    if torch.distributed.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(logged))
    if load is not None:
        kinds = {type(p).__name__ for p in trainer.model_parts[0].parameters()}
        assert kinds == {"DTensor"}, kinds
    trainer.close()


def main() -> None:
    """One process alone, or every plan on the two ranks of one launch."""
    folder, alone = Path(sys.argv[1]), sys.argv[2] == "alone"
    torch.set_num_threads(1)
    if alone:
        run(folder, "alone", None, 2)
        return
    run(folder, "ring", "ring_2", 2)
    run(folder, "data", "data_2", 1)
    run(folder, "fsdp", "ring_2+fsdp", 2, load=1)


if __name__ == "__main__":
    main()
