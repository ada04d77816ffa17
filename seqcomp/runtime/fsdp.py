"""FSDP2: its collectives counted and carried like all others, and its state taken off again.

The one file on FSDP's private interface: torch has no call that undoes `fully_shard`.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from seqcomp.runtime.comm import Communicator
from seqcomp.runtime.traffic import Phase

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes by which `fully_shard` marks modules for dynamo."""


class _Counted:
    """Over the communicator of this rank, counted under a label."""

    def __init__(self, comm: Communicator, label: str) -> None:
        self._comm = comm
        self._label = label

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(_Counted, AllGather):
    """Gathers the shards of one unit's parameters; on the CPU by messages between pairs."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        phase: Phase = "backward" if _in_backward() else "forward"
        if input_tensor.device.type == "cpu":
            rows = self._comm.all_gather(input_tensor, phase=phase, label=self._label)
            output_tensor.copy_(rows.view(-1))
            return None
        self._comm.count("all_gather", (self._comm.size - 1) * input_tensor.nbytes, phase,
                         self._label)  # fmt: skip
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class CountedReduceScatter(_Counted, ReduceScatter):
    """Sums the gradients of one unit's parameters into shards."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM, f"gradients are summed, not {op}"
        if input_tensor.device.type == "cpu":
            rows = input_tensor.view(self._comm.size, -1)
            output_tensor.copy_(
                self._comm.reduce_scatter(rows, phase="backward", label=self._label)
            )
            return None
        sent = input_tensor.nbytes // self._comm.size * (self._comm.size - 1)
        self._comm.count("reduce_scatter", sent, "backward", self._label)
        return dist.reduce_scatter_single(
            output_tensor, input_tensor, group=group, op=op, async_op=async_op
        )


class CountedAllReduce(_Counted):
    """Counts the sum of shards over the ranks that replicate them (HSDP); called after it."""

    def __call__(self, reduced: Tensor) -> None:
        sent = 2 * (self._comm.size - 1) * reduced.nbytes // self._comm.size
        self._comm.count("all_reduce", sent, "backward", self._label)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def shard_again(parts: Sequence[FSDPModule]) -> None:
    """Frees what is whole and not in use. A backward that still wants it gathers it again."""
    modules: list[Any] = list(parts)
    for module in modules:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            group._to_sharded()


def gather_anew(root: FSDPModule) -> None:
    """Calls of `root` begin without parameters that an earlier call left whole.

    They are as they were then: a call without a backward leaves those of the root, and weights
    may have changed since.
    """
    module: Any = root
    state = module._get_fsdp_state()
    key = state._pre_forward_hook_handle.id
    gather = module._forward_pre_hooks[key]

    def hook(*call: Any) -> Any:
        if state._training_state == TrainingState.IDLE:
            shard_again([part for part in module.modules() if isinstance(part, FSDPModule)])
        return gather(*call)

    module._forward_pre_hooks[key] = hook


@contextlib.contextmanager
def as_plain(parts: Sequence[FSDPModule]) -> Iterator[None]:
    """The modules with their own class and without FSDP's hooks, whatever their parameters."""
    modules: list[Any] = list(parts)
    kept = [(type(m), m._forward_pre_hooks, m._forward_hooks) for m in modules]
    for module in modules:
        state = module._get_fsdp_state()
        before, after = state._pre_forward_hook_handle, state._post_forward_hook_handle
        _own_class(module)
        module._forward_pre_hooks = _without(module._forward_pre_hooks, before.id)
        module._forward_hooks = _without(module._forward_hooks, after.id)
    try:
        yield
    finally:
        for module, (kind, before, after) in zip(modules, kept, strict=True):
            module.__class__ = kind
            module._forward_pre_hooks, module._forward_hooks = before, after


def release(part: FSDPModule, comm: Communicator, device: torch.device) -> None:
    """Undoes `fully_shard` of one module: whole parameters in their own dtype, no hooks.

    comm: of the ranks that share the shards; the call is collective over them.
    """
    module: Any = part
    state = module._get_fsdp_state()
    for group in state._fsdp_param_groups:
        for item in group.fsdp_params:
            value = _whole(item, comm, device)
            given = item.sharded_param.requires_grad
            item._setattr_on_modules(nn.Parameter(value, requires_grad=given))
            item._post_load_hook_handle.remove()
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    _own_class(module)
    _module_state_mapping.pop(module, None)
    for key in (STATE_KEY, REGISTRY_KEY):
        vars(module).pop(key, None)
    for managed in module.modules():
        for key in _MARKS:
            vars(managed).pop(key, None)


@torch.no_grad()
def _whole(item: Any, comm: Communicator, device: torch.device) -> Tensor:
    """A parameter on all ranks: plain, or cut by the tensor axis as it was before."""
    local, dim = item.sharded_param._local_tensor, item.fsdp_placement.dim
    if local.is_meta:
        value = local.new_empty(item._orig_size)
    else:
        part = local.new_zeros(item.padded_sharded_param_size, device=device)
        part.narrow(dim, 0, local.shape[dim]).copy_(local)
        rows = comm.all_gather(part, label="fsdp")
        value = torch.cat(list(rows), dim).narrow(dim, 0, item._orig_size[dim]).contiguous()
    spec = item._unsharded_dtensor_spec
    return value if spec is None else DTensor(value, spec, requires_grad=False)


def _own_class(module: Any) -> None:
    module.__class__ = type(module).__mro__[FSDPModule._orig_cls_mro_index]


def _without(hooks: Any, key: int) -> Any:
    return OrderedDict((k, hook) for k, hook in hooks.items() if k != key)
