"""In which precision a program computes."""

from __future__ import annotations

from collections.abc import Collection

import torch

from seqcomp.capture.recognise import AttentionInfo
from seqcomp.lowering import ops


def computing_dtype(graph: torch.fx.Graph, parameters: Collection[str]) -> torch.dtype:
    """The coarsest floating dtype among the values that depend on parameters.

    A model with fp64 weights whose norms cast to fp32 is exact to fp32 only; position tables do
    not count, since all ranks round them alike.
    """
    coarsest = torch.float64
    depends: set[torch.fx.Node] = set()
    for node in graph.nodes:
        given = node.op == "placeholder" and node.name in parameters
        if not given and not any(n in depends for n in node.all_input_nodes):
            continue
        depends.add(node)
        value = node.meta.get("val")
        dtypes = [value.dtype] if isinstance(value, torch.Tensor) else []
        if isinstance(node.target, ops.TokenLocal) and node.target.unit.dtype is not None:
            dtypes.append(node.target.unit.dtype)
        info = node.meta.get("attention")
        if isinstance(info, AttentionInfo) and info.dtype is not None:
            dtypes.append(info.dtype)  # one device rounds here, the compiled module may not
        for dtype in dtypes:
            if dtype.is_floating_point:
                coarsest = max(coarsest, dtype, key=lambda d: torch.finfo(d).eps)
    return coarsest


def rounds_elsewhere(graph: torch.fx.Graph) -> bool:
    """Whether one device rounds where the compiled module does not: a softmax in fp32 among fp64
    values, of an attention that is written out.
    """
    infos = ((n.meta.get("attention"), n.meta.get("val")) for n in graph.nodes)
    return any(
        isinstance(info, AttentionInfo)
        and info.dtype is not None
        and isinstance(value, torch.Tensor)
        and info.dtype != value.dtype
        for info, value in infos
    )
