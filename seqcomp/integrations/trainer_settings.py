"""Arguments of ``transformers.Trainer`` that do not go with a plan."""

from __future__ import annotations

from typing import Any

from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.plan.resolve import ResolvedPlan


def is_divided(resolved: ResolvedPlan) -> bool:
    """Whether ranks hold parts of parameters."""
    return bool(resolved.fsdp_axes) or resolved.tensor_size > 1


def refused(args: Any) -> list[Diagnostic]:
    """SC131 for every one of them, by name."""
    found = []

    def wrong(name: str, help_text: str) -> None:
        found.append(
            diagnostic(
                "SC131",
                where=f"TrainingArguments.{name}",
                found=str(getattr(args, name, None)),
                legal="not set",
                help=help_text,
            )
        )

    if args.fsdp:
        wrong("fsdp", "write fsdp: {} into the plan")
    if args.deepspeed:
        wrong("deepspeed", "leave it out; the plan divides the sequence and the parameters")
    if args.torch_compile:
        wrong("torch_compile", "leave it out: the model is compiled by the plan")
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if getattr(args, name, False):
            wrong(name, "leave it out; see memory: in the plan")
    if args.fp16:
        wrong("fp16", "bf16=True: scaled losses are not known to divided parameters")
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            wrong(
                name, "leave it out: parameters keep their dtype; bf16=True evaluates in bf16 too"
            )
    if getattr(args, "parallelism_config", None) is not None:
        wrong("parallelism_config", "leave it out; the plan says which ranks share a batch")
    if "rebalance" in str(getattr(args, "train_sampling_strategy", "")):
        wrong("train_sampling_strategy", "it gives every rank its own batch; use random")
    return found
