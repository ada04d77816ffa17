"""Every value and cotangent of a graph: of the whole on one device, of the parts on a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from seqcomp.api import of
from seqcomp.capture.units import Unit
from seqcomp.lowering import ops
from seqcomp.lowering.context import Traced
from seqcomp.lowering.ops import Place
from seqcomp.lowering.program import Program
from seqcomp.lowering.snapshot import Operation, Snapshot
from seqcomp.runtime.random import keys_of
from seqcomp.verify.observe import (
    ModelFn,
    Weights,
    named_outputs,
    objective_of,
    projection,
    seeded,
)
from seqcomp.verify.parts import Share
from seqcomp.verify.same_dropout import seed_of_verification


@dataclass
class Trace:
    """Values and cotangents by node name."""

    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def see(self, name: str, value: Any) -> Any:
        """Records a value; the result stands for it, so that it has a gradient of its own."""
        if not isinstance(value, Tensor):
            return value
        local = value.to_local() if isinstance(value, DTensor) else value
        self.values[name] = local.detach()
        if isinstance(value, DTensor) or not value.requires_grad:
            return value
        value = value.view_as(value)
        value.register_hook(lambda gradient: self.gradients.__setitem__(name, gradient.detach()))
        return value


@dataclass(frozen=True)
class Whole:
    """The global graph, run on one device."""

    trace: Trace
    outputs: Mapping[str, Any]
    operations: tuple[Operation, ...]
    parameters: Mapping[str, str]  # placeholder -> name
    traced: Mapping[str, Traced]  # local node -> its global value
    sizes: Mapping[sympy.Symbol, int]
    axes: tuple[str, ...]


@dataclass(frozen=True)
class RankTrace:
    """The local graph of one rank, run on its inputs. Rank 0 also ran the whole."""

    rank: int
    place: Place
    trace: Trace
    whole: Whole | None


def trace_rank(
    model: nn.Module,
    inputs: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    data: tuple[int, int],
    rank: int,
) -> tuple[RankTrace, Program]:
    """Runs the program that `model` (attached with keep_global) has for a call."""
    compiled, order = of(model), list(shapes)
    program, call = compiled.prepare((), dict(inputs))
    snapshot = program.kept
    assert snapshot is not None, "attached without keep_global"
    binding = compiled.binding(program)
    share = Share(*data, compiled.token_index().cpu())
    trace = Trace()
    leaves = run_graph(
        program.flat,
        _given(snapshot, model, call.leaves),
        trace,
        snapshot.parameters,
        binding,
        model,
    )
    _backward(
        leaves,
        program,
        list(shapes),
        lambda name, x: share.of(projection(shapes[name], order.index(name)), tuple(x.shape)),
    )
    _take_parameters(trace, snapshot, model)
    return RankTrace(rank, binding.place(), trace, None), program


def trace_whole(
    program: Program,
    model_fn: ModelFn,
    leaves: tuple[Any, ...],
    shapes: Mapping[str, tuple[int, ...]],
    axes: tuple[str, ...],
) -> Whole:
    """Runs the global graph of `program` with the weights of a new model on the whole inputs."""
    snapshot, trace, order = program.kept, Trace(), list(shapes)
    assert snapshot is not None
    model = seeded(model_fn)
    results = run_graph(
        snapshot.graph,
        _given(snapshot, model, leaves),
        trace,
        snapshot.parameters,
        None,
        model,
    )
    outputs = _backward(
        results, program, order, lambda n, x: projection(tuple(x.shape), order.index(n))
    )
    _take_parameters(trace, snapshot, model)
    return Whole(
        trace=trace,
        outputs={n: x.detach() if isinstance(x, Tensor) else x for n, x in outputs.items()},
        operations=snapshot.operations,
        parameters={k: v for k, v in snapshot.state.items() if k in snapshot.parameters},
        traced=snapshot.values,
        sizes=program.capture.hints,
        axes=axes,
    )


def run_graph(
    graph: torch.fx.Graph,
    given: Mapping[str, Any],
    trace: Trace,
    parameters: frozenset[str],
    rank: ops.RankBinding | None,
    root: nn.Module,
) -> tuple[Any, ...]:
    """Executes a graph node by node. `given`: what each placeholder stands for; `root`: the model
    whose units run."""
    values: dict[torch.fx.Node, Any] = {}
    bound: dict[ops.Op, Callable[..., Any]] = {}
    for node in graph.nodes:
        if node.op == "output":
            return tuple(map_arg(node.args[0], values.__getitem__))
        if node.op == "placeholder":
            value = given[node.name]
        else:
            target = node.target
            if isinstance(target, ops.Op):
                assert rank is not None
                target = bound.setdefault(target, target.bind(rank))
            elif isinstance(target, Unit):
                target = functools.partial(target.run, root)
            args, kwargs = (map_arg(item, values.__getitem__) for item in (node.args, node.kwargs))
            value = target(*args, **kwargs)
        # A parameter's gradient is its own; it must stay the leaf that the model owns.
        values[node] = value if node.name in parameters else trace.see(node.name, value)
    raise AssertionError("a graph without an output")


def _given(snapshot: Snapshot, model: nn.Module, leaves: tuple[Any, ...]) -> dict[str, Any]:
    tensors: dict[str, Any] = dict(model.named_buffers(remove_duplicate=False))
    tensors |= dict(model.named_parameters(remove_duplicate=False))
    tensors |= snapshot.constants
    given: dict[str, Any] = {k: tensors[name] for k, name in snapshot.state.items()}
    if snapshot.dropout_keys is not None:
        device = next(model.parameters()).device
        keys = keys_of(seed_of_verification(), snapshot.dropouts, device)
        given[snapshot.dropout_keys] = keys
    return given | dict(zip(snapshot.inputs, leaves, strict=True))


def _backward(
    leaves: tuple[Any, ...], program: Program, names: list[str], weights: Weights
) -> dict[str, Any]:
    found = named_outputs(pytree.tree_unflatten(list(leaves), program.out_spec))
    outputs = {name: found[name] for name in names if name in found}
    objective_of(outputs, weights).backward()
    return outputs


def _take_parameters(trace: Trace, snapshot: Snapshot, model: nn.Module) -> None:
    named = dict(model.named_parameters(remove_duplicate=False))
    for placeholder in snapshot.parameters:
        parameter = named.get(snapshot.state.get(placeholder, ""))
        if parameter is None:
            continue
        for store, tensor in ((trace.values, parameter), (trace.gradients, parameter.grad)):
            if tensor is not None:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                store[placeholder] = local.detach()
