"""``titan:<model>/<flavor>``: decoders of torchtitan on its SDPA attention module.

torchtitan's registry offers FlexAttention and varlen attention for its language models, which
take the documents of a packed batch as masks; neither has a backward on CPU, so that a spec could
not be verified there. Its own `ScaledDotProductAttention` takes the same arguments and is plainly
causal. A model on FlexAttention compiles like any other: pass `positions` and `attention_masks` as
torchtitan's trainer does.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.integrations.titan_training import parallelize_fn, with_plan
from seqcomp.plan.nearest import nearest

if TYPE_CHECKING:
    from torch import nn

__all__ = ["build_titan", "parallelize_fn", "with_plan"]

# Models whose attention is plainly causal. The SDPA module ignores what others hand to their
# attention (windows, sinks), so that building them on it would give another model.
_CAUSAL = ("llama3", "qwen3")


def build_titan(target: str, where: str, device: str) -> nn.Module:
    """The model that `target` (``<model>/<flavor>``) names; with its initial weights unless meta.

    Raises:
        PlanError: SC020 (no such model or flavor), SC921 (torchtitan is not installed, or the
            model is not one that runs on SDPA).
    """
    if find_spec("torchtitan") is None:
        raise PlanError(
            diagnostic(
                "SC921",
                where=where,
                message="torchtitan is not installed",
                help="pip install 'seqcomp[torchtitan]'",
            )
        )
    import torch

    name, _, flavor = target.partition("/")
    config = _config(name, flavor, where)
    with torch.device(device):
        model: Any = config.build()
    if torch.device(device).type != "meta":
        # Meta tensors have no values to draw; on a device, weights and RoPE tables get theirs.
        with torch.no_grad():
            model.init_states(buffer_device=torch.device(device))
    return model


def _config(name: str, flavor: str, where: str) -> Any:
    """torchtitan's own configuration of a flavor, every attention on its SDPA module."""
    if name not in _CAUSAL:
        raise PlanError(_unknown_model(name, where))
    module = import_module(f"torchtitan.models.{name}")
    flavors: dict[str, Any] = getattr(module, f"{name}_configs")
    if flavor not in flavors:
        close = nearest(flavor, flavors)
        raise PlanError(
            diagnostic(
                "SC020",
                where=where,
                message=f"torchtitan's {name} has no flavor {flavor!r}",
                found=flavor,
                legal=tuple(flavors),
                help=f"did you mean {close}?" if close else None,
            )
        )
    if "moe_comm_backend" in inspect.signature(flavors[flavor]).parameters:
        raise PlanError(
            diagnostic(
                "SC921",
                where=where,
                message="mixtures of experts of torchtitan are not available yet",
                found=flavor,
                help="name a dense flavor",
            )
        )
    from torchtitan.models.common.attention import BaseAttention, ScaledDotProductAttention

    config = module.model_registry(flavor, attn_backend="flex").model
    for _, attention, _, _ in config.traverse(BaseAttention.Config):
        attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def _unknown_model(name: str, where: str) -> Any:
    import torchtitan.models

    known = [info.name for info in iter_modules(torchtitan.models.__path__) if info.ispkg]
    if name in known:
        return diagnostic(
            "SC921",
            where=where,
            message=f"torchtitan's {name} is not available yet",
            found=name,
            legal=_CAUSAL,
            help="name a factory instead: python:<module>:<factory>",
        )
    close = nearest(name, _CAUSAL)
    return diagnostic(
        "SC020",
        where=where,
        message=f"torchtitan has no model {name!r}",
        found=name,
        legal=_CAUSAL,
        help=f"did you mean {close}?" if close else None,
    )
