"""A plan under torchtitan's own Trainer (0.3.0): its config, its loop, our model.

The Trainer deals out the data by its own mesh, ``[data parallel, tensor parallel]``. A sequence
group is one "tensor parallel" group to it: those ranks get the same full batch, and a loss on full
logits is counted once among them. Context parallelism stays 1, or the Trainer cuts the inputs
itself. What it sums over its data ranks, ``loss / global valid tokens``, is what a plan's default
``gradients: sum`` adds up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic, raise_for_errors
from seqcomp.integrations.titan_memory import check_compile, compile_blocks, with_checkpoint
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import ResolvedPlan, resolve

if TYPE_CHECKING:
    from torch import nn

    from seqcomp.plan.schema import Plan

    PlanLike = Plan | Mapping[str, Any] | str | Path

_PRECISIONS = (("none", "float32"), ("bf16", "bfloat16"))  # fsdp.mixed_precision, torchtitan's
_EXAMPLE = 32  # tokens of the call that says how to divide the parameters, or what the plan needs


def with_plan(config: Any, plan: PlanLike) -> Any:
    """`config`, a torchtitan ``Trainer.Config``, set up to train its model under `plan`.

    Sets the degrees and what else the plan decides (precision, offloading, checkpoints where the
    plan has any), and turns off CUDA graphs and tensor-parallel losses. Else FullAC and SelectiveAC
    are what `memory.checkpoint` is, and blocks are compiled. The config is changed and returned.

    Raises:
        PlanError: SC131 for a loss that calls the model's head by itself, other activation
            checkpointing, compilation that does not go with the plan, and what `load_plan` raises.
    """
    from torchtitan.components.loss import ChunkedLossWrapper

    loaded = load_plan(plan)
    resolved = resolve(loaded)
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        raise PlanError(_chunked())
    for place, value in _settings(resolved).items():
        section, _, name = place.partition(".")
        setattr(getattr(config, section), name, value)
    if loaded.memory.checkpoint != "none":
        config.activation_checkpoint = None
    raise_for_errors(
        check_compile(with_checkpoint(loaded, config.activation_checkpoint), config.compile)
    )
    config.model_spec = dataclasses.replace(
        config.model_spec,
        model=_any_degree(config.model_spec.model),
        parallelize_fn=parallelize_fn(plan),
        pipelining_fn=None,
    )
    return config


def parallelize_fn(plan: PlanLike) -> Callable[..., nn.Module]:
    """The ``parallelize_fn`` of a torchtitan ``ModelSpec`` that compiles the model under `plan`.

    The model may be on meta; the Trainer fills it afterwards. Raises PlanError: SC131 where the
    Trainer's settings are not those of the plan, with the lines to set.
    """
    return partial(_parallelize, plan=plan)


def _parallelize(
    model: nn.Module,
    *,
    plan: PlanLike,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    import seqcomp

    del dump_folder
    loaded = with_checkpoint(load_plan(plan), ac_config)
    resolved = resolve(loaded, world_size=parallel_dims.world_size)
    given = {
        "training": training,
        "parallelism": parallelism,
    }
    raise_for_errors(
        [
            *_mismatches(resolved, given, parallel_dims),
            *check_compile(loaded, compile_config),
            *_order(resolved),
        ]
    )
    example = _example_call(model, resolved, training)
    model = seqcomp.parallelize(model, loaded, example_inputs=example)
    compile_blocks(model, compile_config)
    compiled = seqcomp.of(model)
    run = compiled.call

    def call(args: Any, kwargs: dict[str, Any]) -> Any:
        # Set by the Trainer for a loss that runs the head outside of the compiled model, where
        # nobody would add up the head's gradients.
        if getattr(model, "_skip_lm_head", False):
            raise PlanError(_chunked())
        return run(args, kwargs)

    vars(compiled)["call"] = call
    return model


# --- the Trainer's settings -------------------------------------------------------------------


def _settings(resolved: ResolvedPlan) -> dict[str, Any]:
    """Every setting of a ``Trainer.Config`` that the plan decides: path -> value."""
    fsdp = resolved.plan.strategies.fsdp
    batch = math.prod(resolved.axes[axis] for axis in resolved.batch_axes)
    settings = {
        "parallelism.data_parallel_replicate_degree": 1,
        "parallelism.data_parallel_shard_degree": batch,
        "parallelism.tensor_parallel_degree": resolved.sequence_size,
        "parallelism.context_parallel_degree": 1,
        "parallelism.pipeline_parallel_degree": 1,
        "parallelism.expert_parallel_degree": 1,
        "parallelism.spmd_backend": "partial_dtensor",  # others read logits as cut by vocabulary
        "training.mixed_precision_param": dict(_PRECISIONS).get(
            fsdp.mixed_precision if fsdp else "none", "float16"
        ),
        "training.enable_cpu_offload": fsdp is not None and fsdp.offload == "cpu",
        "training.disable_cuda_graphs": True,
    }
    if resolved.sequence_size > 1:
        # Only a check that the degree divides the length: the plan's own is exact, or pads.
        settings["parallelism.enable_sequence_parallel"] = False
    return settings


def _mismatches(
    resolved: ResolvedPlan, given: Mapping[str, Any], parallel_dims: Any
) -> list[Diagnostic]:
    found = []
    for place, wanted in _settings(resolved).items():
        section, _, name = place.partition(".")
        if name in ("data_parallel_replicate_degree", "enable_sequence_parallel"):
            continue  # only the product counts; only a check
        if name == "data_parallel_shard_degree":
            value = parallel_dims.dp_replicate * parallel_dims.dp_shard
        else:
            value = getattr(given[section], name)
        if value != wanted:
            found.append(_wrong(place, value, wanted))
    return found


def _wrong(place: str, value: Any, wanted: Any) -> Diagnostic:
    return diagnostic(
        "SC131",
        where=f"torchtitan {place}",
        found=str(value),
        legal=str(wanted),
        help=f"config.{place} = {wanted!r}; "
        "seqcomp.integrations.torchtitan.with_plan(config, plan) sets all of them",
    )


def _order(resolved: ResolvedPlan) -> list[Diagnostic]:
    """The Trainer's data ranks are the outermost; the plan's must be the same ranks."""
    wide = [axis for axis, size in resolved.axes.items() if size > 1]
    batch = [axis for axis in wide if axis in resolved.batch_axes]
    if wide[: len(batch)] == batch:
        return []
    order = ", ".join(f"{a}: {resolved.axes[a]}" for a in [*batch, *wide] if a in resolved.axes)
    order = ", ".join(dict.fromkeys(order.split(", ")))
    return [
        diagnostic(
            "SC131",
            where="mesh",
            found=f"{tuple(resolved.axes)}",
            legal="axes that cut the batch before those that cut the sequence",
            help=f"mesh: {{{order}}}",
        )
    ]


def _chunked() -> Diagnostic:
    return diagnostic(
        "SC131",
        where="torchtitan loss",
        found="ChunkedLossWrapper, which calls the model's head by itself",
        legal="a loss on the logits",
        help="config.loss = CrossEntropyLoss.Config()",
    )


def _any_degree(model_config: Any) -> Any:
    """The model's config without torchtitan's rule that its own tensor parallelism fits the heads.

    The plan's rules say what fits: rings have any degree.
    """
    kind: Any = type(model_config)

    class AnyDegree(kind):
        __slots__ = ()

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            alone = dataclasses.replace(config.parallelism, tensor_parallel_degree=1)
            kind.update_from_config(
                self, config=dataclasses.replace(config, parallelism=alone), **kwargs
            )

    AnyDegree.__name__, AnyDegree.__qualname__ = kind.__name__, kind.__qualname__
    changed = dataclasses.replace(model_config)
    changed.__class__ = AnyDegree
    return changed


# --- the example call -------------------------------------------------------------------------


def _example_call(model: nn.Module, resolved: ResolvedPlan, training: Any) -> dict[str, Any] | None:
    """A short call as the Trainer makes it, where parameters are divided before the first one."""
    import torch
    from torchtitan.models.common.attention import FlexAttention

    if resolved.tensor_size == 1 and not resolved.fsdp_axes:
        return None
    factor = resolved.layout_for(None, True).factor
    length = min(training.seq_len, factor * max(2, _EXAMPLE // factor))
    device = next(model.parameters()).device
    tokens = torch.zeros(training.local_batch_size, length, dtype=torch.long, device=device)
    positions = torch.arange(length, device=device).expand_as(tokens).contiguous()
    call = {"tokens": tokens, "positions": positions}
    if any(isinstance(part, FlexAttention) for part in model.modules()):
        masks: Any = model.get_attention_masks
        with torch.compiler.set_stance("force_eager"):  # compiling this takes longer than the rest
            call["attention_masks"] = masks(positions)
    return call
