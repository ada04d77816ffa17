"""Arguments of transformers' Trainer that a plan has no place for are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from seqcomp.integrations.trainer_settings import refused
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve


def arguments(**changes: Any) -> SimpleNamespace:
    names = (
        "fsdp", "deepspeed", "torch_compile", "fp16", "bf16", "bf16_full_eval", "fp16_full_eval",
        "gradient_checkpointing", "load_best_model_at_end",
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
    (found,) = refused(arguments(**{name: True}), resolve(load_plan("ring_2")))
    assert (found.code, found.where) == ("SC131", f"TrainingArguments.{name}")


def test_divided_parameters() -> None:
    best = arguments(load_best_model_at_end=True, bf16=True)
    assert not refused(best, resolve(load_plan("ring_2")))
    for plan in ("ring_2+fsdp", "megatron_sp_2"):
        (found,) = refused(best, resolve(load_plan(plan)))
        assert found.where == "TrainingArguments.load_best_model_at_end"
        assert not refused(arguments(bf16=True), resolve(load_plan(plan)))
