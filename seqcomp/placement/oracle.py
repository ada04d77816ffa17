"""DTensor's own opinion on an operation that has no rule here; the one file on that private API.

Asked on specs alone (no tensors). Its answer is taken only when it leaves every operand where it
is and speaks of plain shards and replicas: whatever else it proposes (gathers, averages, strided
shards) is not what the plan asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.fx import Node
from torch.fx.node import map_arg

from seqcomp.capture.edit import is_tensor
from seqcomp.capture.sizes import Size, evaluate
from seqcomp.placement.rule import Decision, Env, summed, tensor_args
from seqcomp.placement.spec import Factor, Spec, whole


class Oracle:
    """Queries on a mesh that needs no process group."""

    def __init__(self, axes: Mapping[str, int], hints: Mapping[sympy.Symbol, int]):
        self._axes = dict(axes)
        self._hints = dict(hints)
        sizes = tuple(axes.values()) or (1,)
        ranks = torch.arange(math.prod(sizes)).view(sizes)
        # No backend and a fixed rank: a description of a mesh, not a mesh.
        self._mesh = DeviceMesh(
            "cpu", ranks, mesh_dim_names=tuple(axes) or ("none",), _init_backend=False, _rank=0
        )

    def decide(self, node: Node, env: Env) -> Decision | None:
        """A decision that keeps every operand in place, or None."""
        if not isinstance(node.target, torch._ops.OpOverload) or not is_tensor(node):
            return None
        specs = {n: summed(env.spec(n)) for n in tensor_args(node)}
        if any(len(d) > 1 for s in specs.values() for d in s.dims) or not self._axes:
            return None
        answer = self._ask(node, specs, env)
        if answer is None or not isinstance(answer.out, Spec):
            return None
        return Decision(specs, answer.out)

    def _ask(self, node: Node, specs: Mapping[Node, Spec], env: Env) -> Decision | None:
        def operand(item: Node) -> Any:
            if item in specs:
                return self._spec(specs[item], item, env)
            value = item.meta.get("val")
            return int(value) if isinstance(value, int) else value.node.hint

        try:
            schema = OpSchema(
                node.target, map_arg(node.args, operand), map_arg(node.kwargs, operand)
            )
            propagator = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator
            result = propagator.propagate_op_sharding_non_cached(schema)
        except Exception:
            return None
        given = [a for a in schema.args_schema if isinstance(a, DTensorSpec)]
        if result.redistribute_schema is not None:
            wanted = [
                a for a in result.redistribute_schema.args_schema if isinstance(a, DTensorSpec)
            ]
            if [w.placements for w in wanted] != [g.placements for g in given]:
                return None
        out = result.output_spec
        if not isinstance(out, DTensorSpec):
            return None
        return self._decision(out, env.shape(node))

    def _spec(self, spec: Spec, node: Node, env: Env) -> DTensorSpec:
        shape = torch.Size(evaluate(s, self._hints) for s in env.shape(node))
        meta = TensorMeta(shape, _strides(shape), node.meta["val"].dtype)
        return DTensorSpec(
            self._mesh, spec.placements(tuple(self._axes), self._hints), tensor_meta=meta
        )

    def _decision(self, out: DTensorSpec, shape: tuple[Size, ...]) -> Decision | None:
        axes: dict[int, list[str]] = {}
        for axis, placement in zip(self._axes, out.placements, strict=True):
            if type(placement) is Shard:
                axes.setdefault(placement.dim, []).append(axis)
            elif not isinstance(placement, Replicate):
                return None
        dims = tuple(
            (Factor(size, tuple(axes[i])),) if i in axes else whole(size)
            for i, size in enumerate(shape)
        )
        return Decision({}, Spec(dims))


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
