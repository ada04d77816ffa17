"""Arguments of transformers' Trainer that a plan has no place for are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from seqcomp.integrations.trainer_settings import refused


def arguments(**changes: Any) -> SimpleNamespace:
    names = (
        "fsdp", "deepspeed", "torch_compile", "fp16", "bf16", "bf16_full_eval", "fp16_full_eval",
        "gradient_checkpointing",
    )  # fmt: skip
    return SimpleNamespace(**(dict.fromkeys(names, False) | changes))


@pytest.mark.parametrize(
    "name",
    [
        "fsdp", "deepspeed", "torch_compile", "fp16", "bf16_full_eval", "fp16_full_eval",
        "gradient_checkpointing",
    ],
)  # fmt: skip
def test_by_name(name: str) -> None:
    (found,) = refused(arguments(**{name: True}))
    assert (found.code, found.where) == ("SC131", f"TrainingArguments.{name}")


def test_what_goes_with_every_plan() -> None:
    assert not refused(arguments(load_best_model_at_end=True, bf16=True))
