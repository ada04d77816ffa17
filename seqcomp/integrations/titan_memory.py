"""torchtitan's settings of activation checkpointing and compilation, as a plan means them.

FullAC is ``memory: {checkpoint: block}``, SelectiveAC ``selective``, which keeps what attention and
exchanges gave, and no products of matrices. Compiled are the blocks, as torchtitan does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic

if TYPE_CHECKING:
    from torch import nn

    from seqcomp.plan.schema import Plan


def with_checkpoint(plan: Plan, setting: Any) -> Plan:
    """`plan` with the checkpoints that a torchtitan config asks for. None asks for none.

    Raises PlanError SC131 for a setting that has no meaning in a plan, or not that of the plan.
    """
    if setting is None:
        return plan
    wanted = _checkpoint(setting)
    asked = plan.memory.checkpoint
    if wanted is None or asked not in ("none", wanted):
        raise PlanError(_refused(setting, asked))
    memory = plan.memory.model_copy(update={"checkpoint": wanted})
    return plan.model_copy(update={"memory": memory})


def _checkpoint(setting: Any) -> str | None:
    """What `memory.checkpoint` is for a torchtitan policy of these settings; None for no value."""
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    if setting.debug or setting.determinism_check != "default":
        return None
    # Others, and policies derived of these, have rules of their own for what is saved.
    if type(setting) is FullAC.Config:
        return "block"
    # Its list of products that are not saved is true of all products here.
    return "selective" if type(setting) is SelectiveAC.Config else None


def _refused(setting: Any, asked: str) -> Diagnostic:
    kind = type(setting).__qualname__
    plan = f", beside memory.checkpoint: {asked} of the plan" if asked != "none" else ""
    return diagnostic(
        "SC131",
        where="torchtitan activation_checkpoint",
        found=f"{kind}{plan}",
        legal="None, FullAC.Config() or SelectiveAC.Config() without determinism_check and debug",
        help="config.activation_checkpoint = None, and memory: {checkpoint: block | selective} in "
        "the plan",
    )


def check_compile(plan: Plan, setting: Any) -> list[Diagnostic]:
    """SC131 for a model that is to be compiled in a way that the plan does not go with."""
    if not (setting.enable and "model" in setting.components):
        return []
    others = []
    if plan.strategies.fsdp is not None:
        others.append("fsdp")
    if plan.memory.checkpoint != "none":
        others.append("memory.checkpoint (or activation_checkpoint)")
    if setting.enable_async_tensor_parallel:
        others.append("compile.enable_async_tensor_parallel")
    return [
        diagnostic(
            "SC131",
            where="torchtitan compile.components",
            found=f"model, beside {other}",
            legal="compiled blocks without fsdp, checkpoints and asynchronous tensor parallelism",
            help="config.compile.components = ['loss']",
        )
        for other in others
    ]


def compile_blocks(model: nn.Module, setting: Any) -> None:
    """Compiles every block of a compiled model, where the config asks for it."""
    from seqcomp.capture.blocks import blocks_of

    if setting.enable and "model" in setting.components:
        for path in blocks_of(model):
            model.get_submodule(path).compile(backend=setting.backend)
