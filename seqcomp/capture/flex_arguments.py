"""Block masks among the arguments of a call: their functions without the tensors these close over.

A BlockMask made for one batch holds that batch's document numbers in the closure of its mask_mod.
These tensors are inputs of the call like any others; what is left is the same for every batch and
is part of the call's structure. The blocks themselves are dropped: the compiler cuts its own.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.utils import _pytree as pytree

from seqcomp.capture.flex_trace import bare_mask
from seqcomp.diagnostics import PlanError, diagnostic

Build = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Skeleton:
    """A mask without its tensors: equal ones compute the same from equal tensors.

    key: its functions and numbers. lengths: of queries and keys, each an input's dim that has the
    same size ("tokens:1") or a number.
    """

    key: str
    names: tuple[str, ...]
    lengths: tuple[str, str]
    sizes: tuple[int, int] = field(compare=False, repr=False)
    build: Build = field(compare=False, repr=False)


class DescribedMask(flex.BlockMask):
    """A BlockMask as an argument of a captured call; a pytree whose leaves are its tensors."""

    skeleton: Skeleton
    tensors: tuple[Any, ...]

    @classmethod
    def of(cls, skeleton: Skeleton, tensors: Sequence[Any]) -> DescribedMask:
        """Where `tensors` are other things (shapes of inputs), the mask only carries them."""
        given = dict(zip(skeleton.names, tensors, strict=True))
        mask: DescribedMask = bare_mask(
            skeleton.build(given), skeleton.sizes, _device(tensors), cls
        )
        mask.skeleton, mask.tensors = skeleton, tuple(tensors)
        return mask


def _device(tensors: Sequence[Any]) -> torch.device:
    return next((x.device for x in tensors if isinstance(x, Tensor)), torch.device("cpu"))


def _keys(mask: DescribedMask) -> tuple[list[tuple[Any, Any]], Skeleton]:
    named = zip(mask.skeleton.names, mask.tensors, strict=True)
    return [(pytree.GetAttrKey(name), x) for name, x in named], mask.skeleton


pytree.register_pytree_node(
    DescribedMask,
    lambda mask: (list(mask.tensors), mask.skeleton),
    lambda tensors, skeleton: DescribedMask.of(skeleton, list(tensors)),
    flatten_with_keys_fn=_keys,
)


def described(arguments: Any, where: str) -> Any:
    """Arguments of a call with every BlockMask as a DescribedMask.

    Raises PlanError SC302 where the function of one holds what is neither a tensor nor a constant.
    """
    sizes = _sizes(arguments)

    def change(item: Any) -> Any:
        if not isinstance(item, flex.BlockMask) or isinstance(item, DescribedMask):
            return item
        reader = _Reader(where)
        build = reader.read(item.mask_mod, "mask_mod")
        lengths = tuple(int(n) for n in item.seq_lengths)
        named = tuple(sizes.get(n, str(n)) for n in lengths)
        skeleton = Skeleton(
            "+".join(reader.keys), tuple(reader.tensors), named, lengths, build
        )  # fmt: skip
        return DescribedMask.of(skeleton, list(reader.tensors.values()))

    return pytree.tree_map(change, arguments, is_leaf=lambda x: isinstance(x, flex.BlockMask))


def _sizes(arguments: Any) -> dict[int, str]:
    """A name for each size of the tensors among the arguments."""
    paths, _ = pytree.tree_flatten_with_path(
        arguments, is_leaf=lambda x: isinstance(x, flex.BlockMask)
    )
    found: dict[int, str] = {}
    for path, leaf in paths:
        if isinstance(leaf, Tensor):
            for dim in (1, 0, *range(2, leaf.ndim)):
                if dim < leaf.ndim:
                    found.setdefault(leaf.shape[dim], f"{pytree.keystr(path)}:{dim}")
    return found


class _Reader:
    """Takes a function apart; `tensors` by name, `keys` of all the rest."""

    def __init__(self, where: str):
        self._where = where
        self._open: list[int] = []
        self.tensors: dict[str, Tensor] = {}
        self.keys: list[str] = []

    def read(self, item: Any, name: str) -> Build:
        """A function that makes `item` again from tensors by name."""
        if isinstance(item, Tensor):
            return self._tensor(item, name)
        if isinstance(item, types.FunctionType):
            return self._function(item)
        if isinstance(item, functools.partial):
            parts = self.read((item.func, item.args, dict(item.keywords)), name)

            def partial(given: Mapping[str, Any]) -> Any:
                fn, args, kwargs = parts(given)
                return functools.partial(fn, *args, **kwargs)

            return partial
        if type(item) in (tuple, list):
            self.keys.append(f"{type(item).__name__}{len(item)}")
            builds = [self.read(x, f"{name}_{i}") for i, x in enumerate(item)]
            return lambda given: type(item)(build(given) for build in builds)
        if type(item) is dict:
            self.keys.append(f"dict{list(item)!r}")
            named = {key: self.read(x, f"{name}_{key}") for key, x in item.items()}
            return lambda given: {key: build(given) for key, build in named.items()}
        self.keys.append(self._constant(item, name))
        return lambda given: item

    def _tensor(self, item: Tensor, name: str) -> Build:
        own = next((n for n, x in self.tensors.items() if x is item), None)
        if own is None:
            own, count = name, 2
            while own in self.tensors:
                own, count = f"{name}_{count}", count + 1
            self.tensors[own] = item
        self.keys.append(f"%{own}")
        return lambda given: given[own]

    def _function(self, fn: types.FunctionType) -> Build:
        if id(fn) in self._open:
            raise self._refused(f"{fn.__qualname__}, which refers to itself")
        self._open.append(id(fn))
        code = fn.__code__
        self.keys.append(f"{fn.__module__}.{fn.__qualname__}#{_digest(code)}")
        cells = [
            self.read(cell.cell_contents, name)
            for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True)
        ]
        defaults = self.read((fn.__defaults__ or (), fn.__kwdefaults__ or {}), "default")
        outer = {
            name: self.read(value, name)
            for name in code.co_names
            if isinstance(value := fn.__globals__.get(name), Tensor | bool | int | float)
        }
        self._open.pop()

        def function(given: Mapping[str, Any]) -> Any:
            scope = {**fn.__globals__, **{name: build(given) for name, build in outer.items()}}
            closed = tuple(types.CellType(build(given)) for build in cells)
            own, named = defaults(given)
            made = types.FunctionType(code, scope, fn.__name__, own or None, closed)
            made.__kwdefaults__ = named or None
            return made

        return function

    def _constant(self, item: Any, name: str) -> str:
        if item is None or isinstance(item, _CONSTANTS):
            return repr(item)
        if isinstance(item, type | types.ModuleType | types.BuiltinFunctionType):
            return str(getattr(item, "__qualname__", item.__name__))
        raise self._refused(f"{name}, an object of {type(item).__name__}")

    def _refused(self, found: str) -> PlanError:
        return PlanError(
            [
                diagnostic(
                    "SC302",
                    where=self._where,
                    found=f"a block mask whose mask_mod holds {found}",
                    legal="tensors, numbers, functions and containers of them",
                    help="let mask_mod close over the tensors and numbers that it needs themselves",
                )
            ]
        )


_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def _digest(code: types.CodeType) -> str:
    parts = [code.co_code, repr((code.co_names, code.co_varnames, code.co_freevars)).encode()]
    for item in code.co_consts:
        own = _digest(item) if isinstance(item, types.CodeType) else repr(item)
        parts.append(own.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]
