"""A call as torch.export takes it: fake tensors, sizes that may differ, keywords by name."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from seqcomp.capture.call import BATCH, InputDims
from seqcomp.capture.flex_arguments import DescribedMask
from seqcomp.capture.forwards import standing_in


@contextlib.contextmanager
def named_keywords(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Gives the forward a parameter per keyword that it takes as **kwargs.

    torch.export 2.13 loses track of dynamic shapes inside **kwargs.
    """
    forward = module.forward
    parameters = list(inspect.signature(forward).parameters.values())
    extra = [name for name in kwargs if name not in {p.name for p in parameters}]
    if not extra:
        yield
        return
    kept = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in extra]

    def named(*args: Any, **given: Any) -> Any:
        return forward(*args, **given)

    named.__signature__ = inspect.Signature([*kept, *added])
    with standing_in(module, named):
        yield


def by_parameter(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Values of a call under the names of forward's parameters, *args and **kwargs nested."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)

    def children(item: Any) -> Any:
        # torch.export wants the parts of other containers than its own as a list.
        return list(item.tensors) if isinstance(item, DescribedMask) else item

    found: dict[str, Any] = pytree.tree_map(
        children, dict(bound.arguments), is_leaf=lambda x: isinstance(x, DescribedMask)
    )
    return found


def example_of(leaf: Any, dims: InputDims | None, data_degree: int, mode: FakeTensorMode) -> Any:
    """A fake tensor with the batch of all data ranks; what is no tensor is as it was."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    assert dims is not None
    shape = [
        size * data_degree if role == BATCH else size
        for size, role in zip(leaf.shape, dims.dims, strict=True)
    ]
    with mode:
        return torch.empty(
            shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad
        )


def dynamic_dims(leaf: Any, dims: InputDims | None) -> Any:
    """What torch.export is told of the sizes of an input that may differ between calls."""
    if dims is None:
        return None
    return {
        i: torch.export.Dim.AUTO
        for i, role in enumerate(dims.dims)
        if role is not None and leaf.shape[i] > 1
    }
