"""Captures of small modules, and their graphs run on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from seqcomp.capture.call import Call, bind_call, classify_inputs, signature_of
from seqcomp.capture.edit import op_name
from seqcomp.capture.export import Capture, exported


def call_of(module: nn.Module, *args: Any, **kwargs: Any) -> Call:
    signature = signature_of(module.forward)
    return bind_call(signature, args, kwargs, where=type(module).__name__, stateless=False)


def capture_of(
    module: nn.Module,
    *args: Any,
    given: Callable[[str], Any] = lambda name: None,
    data_degree: int = 1,
    is_unit: Callable[[str], bool] = lambda path: False,
    **kwargs: Any,
) -> Capture:
    """The capture of one call, as exported."""
    call = call_of(module, *args, **kwargs)
    dims = classify_inputs(call, given)
    where = type(module).__name__
    with exported(
        module, call, dims, data_degree=data_degree, where=where, is_unit=is_unit
    ) as capture:
        return capture


def run(capture: Capture, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the captured graph computes for a call, in the structure of the original."""
    call = call_of(module, *args, **kwargs)
    state = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
        **capture.constants,
    }
    values = dict(zip(capture.inputs, call.leaves, strict=True))
    values |= {name: state[target] for name, target in capture.state.items()}
    owner = capture.graph.owning_module
    assert owner is not None
    graph_module = torch.fx.GraphModule(owner, capture.graph)
    placeholders = [n.name for n in capture.graph.nodes if n.op == "placeholder"]
    leaves = torch.fx.Interpreter(graph_module).run(
        *(values[name] for name in placeholders), enable_io_processing=False
    )
    return pytree.tree_unflatten(list(leaves), capture.out_spec)


def ops_of(capture: Capture) -> list[str]:
    return [op_name(n) for n in capture.graph.nodes if n.op == "call_function"]


def node_of(capture: Capture, name: str) -> Node:
    """The only node with this operation."""
    (node,) = [n for n in capture.graph.nodes if n.op == "call_function" and op_name(n) == name]
    return node


class Calls(nn.Module):
    """A module whose forward is a function of (self, one tensor)."""

    def __init__(self, fn: Callable[[nn.Module, Tensor], Any], **buffers: Tensor):
        super().__init__()
        self.fn = fn
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)
