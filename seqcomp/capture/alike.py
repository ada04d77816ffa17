"""Whether a model treats its blocks alike, so that one of them stands for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

_OTHERWISE = -1
_Calls = list[tuple[str, Any]]


def called_alike(module: nn.Module, paths: Sequence[str], call: Mapping[str, Any]) -> bool:
    """Whether a call runs each block once, in this order, with the same arguments.

    The same: equal values and the very same tensors, but for one floating tensor, which goes from
    block to block. A mask that is chosen by a layer's number is another tensor or value. Runs the
    forward around the blocks on fake tensors; of one that cannot run so, nothing is known.
    """
    return any(_alike(_calls_of(module, paths, call, form), paths) for form in _FORMS)


def _one(x: Tensor) -> Any:
    return x


def _in_tuple(x: Tensor) -> Any:
    return (x,)


_FORMS: tuple[Callable[[Tensor], Any], ...] = (_one, _in_tuple)  # of a block's result


def _calls_of(
    module: nn.Module,
    paths: Sequence[str],
    call: Mapping[str, Any],
    form: Callable[[Tensor], Any],
) -> _Calls:
    """Path and arguments of the blocks' calls, in their order; none where the forward fails."""
    seen: _Calls = []
    try:
        with _standing_in(module, paths, seen, form), FakeTensorMode(allow_non_fake_inputs=True):
            module(**call)
    except Exception:
        # A model is arbitrary code, and its capture says what is wrong with it.
        return []
    return seen


@contextmanager
def _standing_in(
    module: nn.Module, paths: Sequence[str], seen: _Calls, form: Callable[[Tensor], Any]
) -> Iterator[None]:
    """Blocks that note their arguments and give their first floating tensor back, as a new one."""
    blocks = {path: module.get_submodule(path) for path in paths}
    before = {path: vars(block).get("forward") for path, block in blocks.items()}

    def stand_in(where: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            seen.append((where, (args, kwargs)))
            leaves = pytree.tree_leaves((args, kwargs))
            return form(next(x for x in leaves if _floats(x)).clone())

        return forward

    for path, block in blocks.items():
        block.forward = stand_in(path)
    try:
        with torch.no_grad():
            yield
    finally:
        for path, block in blocks.items():
            del block.forward
            if before[path] is not None:
                block.forward = before[path]


def _alike(seen: _Calls, paths: Sequence[str]) -> bool:
    if [path for path, _ in seen] != list(paths):
        return False
    (first, spec), *others = (pytree.tree_flatten(given) for _, given in seen)
    if any(other != spec for _, other in others):
        return False
    different = set[int]().union(*(_different(first, leaves) for leaves, _ in others))
    return len(different) <= 1 and _OTHERWISE not in different


def _different(first: Sequence[Any], second: Sequence[Any]) -> set[int]:
    """Positions of floating tensors that are not the same; OTHERWISE for all else that differs."""
    found = set()
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        if a is b:
            continue
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            travels = _floats(a) and (a.shape, a.dtype) == (b.shape, b.dtype)
            found.add(index if travels else _OTHERWISE)
        elif type(a) is not type(b) or a != b:
            found.add(_OTHERWISE)
    return found


def _floats(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
