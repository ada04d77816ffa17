"""What a module returns for how many tokens, found by calling it on a few.

A unit is not traced, so its outputs are found honestly: its own code runs on small real tensors of
several token counts, and each size that it returns is one that it was given, or a constant. What
would make ranks differ (random numbers, changed buffers or arguments) shows at the same time.
"""

from __future__ import annotations

import itertools
import math
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from seqcomp.capture.structure import Structure
from seqcomp.diagnostics import PlanError, diagnostic

_UNRESERVED = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, without a name in 3.11
_SMALL = (2, 6)  # values that sizes of the call take first; one more of each tells them apart


@dataclass(frozen=True)
class Size:
    """A size of a result: the product of dims start..stop of an input; or, of none, a constant."""

    value: int
    source: int | None = None
    start: int = 0
    stop: int = 0

    def of(self, shapes: Sequence[Sequence[Any]]) -> Any:
        """The size for inputs of these shapes."""
        if self.source is None:
            return self.value
        return math.prod(shapes[self.source][self.start : self.stop])


@dataclass(frozen=True)
class Probed:
    """What a call returned: tensors by dtype and shape, and the container that they were in.

    `dtype` is the coarsest floating one that the call computed in, `counted` the counters that it
    changed and their bytes.
    """

    structure: Structure
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None
    counted: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class StandIns:
    """Real tensors in place of the arguments, the parameters and the buffers of a module."""

    inputs: list[Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Probe:
    """Calls a module on real tensors while a capture runs.

    `parameters` are the module's own, `call` its forward, `like` the captured arguments,
    `counters` the buffers that it may add to.
    """

    path: str
    module: nn.Module
    parameters: Mapping[str, Tensor]
    call: Callable[[Sequence[Tensor]], Any]
    like: Sequence[Tensor]
    counters: tuple[str, ...] = ()

    def at(self, shapes: Sequence[Sequence[int]]) -> Probed:
        """What it returns for arguments of these shapes: ones, or zeros where they are integers.

        Raises PlanError SC313 (it fails, or returns what is not a tensor), SC307 (it changes a
        buffer or an argument), SC308 (it draws random numbers).
        """
        with self.standing_in(shapes) as made:
            inputs, buffers = made.inputs, made.buffers
            versions = {name: b._version for name, b in buffers.items()}
            watch = _Watch()
            try:
                with watch:
                    out = self.call(inputs)
            except Exception as error:
                found = f"it fails on {_described(inputs)}: {type(error).__name__}: {error}"
                raise self._refused("SC313", found) from error
            now = dict(self.module.named_buffers(remove_duplicate=False))
            counted = []
            for name, b in buffers.items():
                if now.get(name) is b and b._version == versions[name]:
                    continue
                if now.get(name) is b and name in self.counters:
                    counted.append((name, b.numel() * b.element_size()))
                else:
                    raise self._refused("SC307", f"it changes its buffer {name}")
            if any(x._version for x in inputs):
                raise self._refused("SC307", "it changes its arguments in place")
            if watch.random:
                raise self._refused("SC308", f"it draws random numbers: {watch.random}")
            return self._probed(out, watch.coarsest, tuple(counted))

    @contextmanager
    def standing_in(self, shapes: Sequence[Sequence[int]]) -> Iterator[StandIns]:
        """The module with real tensors in it, away from the capture, without gradients."""
        with _outside_of_the_capture():
            inputs = [_stand_in(x, shape) for x, shape in zip(self.like, shapes, strict=True)]
            device = inputs[0].device
            buffers = {
                name: torch.zeros_like(b, device=device) if b.is_meta else b.detach().clone()
                for name, b in self.module.named_buffers(remove_duplicate=False)
            }
            own = {name: _real(p, device) for name, p in self.parameters.items()}
            with _reparametrize_module(self.module, {**own, **buffers}):
                yield StandIns(inputs, own, buffers)

    def _probed(
        self, out: Any, coarsest: torch.dtype | None, counted: tuple[tuple[str, int], ...]
    ) -> Probed:
        structure, tensors = Structure.of(out)
        if not all(isinstance(x, type(None) | bool | int | float | str) for x in structure.others):
            kinds = [type(x).__name__ for x in structure.others]
            raise self._refused("SC313", f"it returns {kinds}")
        if not tensors:
            raise self._refused("SC313", "it returns no tensor")
        return Probed(
            structure,
            tuple(x.dtype for x in tensors),
            tuple(tuple(x.shape) for x in tensors),
            coarsest,
            counted,
        )

    def _refused(self, code: str, found: str) -> PlanError:
        return PlanError(
            [
                diagnostic(
                    code,
                    where=self.path,
                    found=found,
                    legal="a module that computes tensors of each token alone, and keeps nothing",
                    help="mark another module with token_local: true, or none",
                )
            ]
        )

    def untold(self, found: str) -> PlanError:
        """SC313, for what several calls do not agree on."""
        return self._refused("SC313", found)


def output_sizes(
    probe: Probe, inputs: Sequence[Tensor]
) -> tuple[Probed, tuple[tuple[Size, ...], ...]]:
    """What the module returns, and every size of it by the sizes of `inputs` (fake tensors).

    Raises PlanError as `Probe.at`, and SC313 for a size that is none of those given.
    """
    known = sorted({s for x in inputs for s in symbols_of(x)}, key=str)
    first = {symbol: _SMALL[i % 2] + 4 * (i // 2) for i, symbol in enumerate(known)}
    trials = [first, *({**first, symbol: first[symbol] + 1} for symbol in known)]
    given = [[at_sizes(x, trial, probe) for x in inputs] for trial in trials]
    results = [probe.at(shapes) for shapes in given]
    alike = {
        (str(r.structure.spec), r.structure.others, r.dtypes, tuple(map(len, r.shapes)))
        for r in results
    }
    if len(alike) > 1:
        raise probe.untold("what it returns depends on how many tokens there are")
    outputs = []
    for index, shape in enumerate(results[0].shapes):
        sizes = [
            _size([r.shapes[index][dim] for r in results], given, probe)
            for dim in range(len(shape))
        ]
        outputs.append(tuple(sizes))
    return results[0], tuple(outputs)


def _size(seen: Sequence[int], given: Sequence[Sequence[Sequence[int]]], probe: Probe) -> Size:
    if len(set(seen)) == 1:
        return Size(seen[0])
    for source, shape in enumerate(given[0]):
        for start, stop in itertools.combinations(range(len(shape) + 1), 2):
            size = Size(seen[0], source, start, stop)
            if [size.of(shapes) for shapes in given] == list(seen):
                return size
    raise probe.untold(f"it returns {seen[0]} rows for arguments {list(map(list, given[0]))}")


def symbols_of(x: Tensor) -> Iterator[sympy.Symbol]:
    """The open sizes in the shape of a fake tensor."""
    for size in x.shape:
        if isinstance(size, torch.SymInt):
            yield from size.node.expr.free_symbols


def at_sizes(x: Tensor, trial: Mapping[sympy.Symbol, int], probe: Probe) -> list[int]:
    """The shape of x for these sizes. Raises PlanError SC313 for one that is no whole number."""
    shape = []
    for size in x.shape:
        value = size.node.expr.subs(trial) if isinstance(size, torch.SymInt) else size
        if value != int(value):
            raise probe.untold(f"an argument with a dim of {size}")
        shape.append(int(value))
    return shape


def _stand_in(like: Tensor, shape: Sequence[int]) -> Tensor:
    device = "cpu" if like.device.type == "meta" else like.device
    make = torch.ones if like.dtype.is_floating_point else torch.zeros
    return make(tuple(shape), dtype=like.dtype, device=device)


def _real(parameter: Tensor, device: torch.device) -> Tensor:
    """The parameter, or zeros in its shape where it holds no values.

    Kernels insist on strides. On a CPU the zeros are pages that are never written, so that not even
    the experts of a large mixture take memory; they may be more than the machine has.
    """
    if not parameter.is_meta and (0 not in parameter.stride() or not parameter.dim()):
        return parameter.detach()
    size = parameter.numel() * parameter.element_size()
    if device.type != "cpu" or not size:
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
    return torch.frombuffer(pages, dtype=parameter.dtype).view(parameter.shape)


def _described(inputs: Sequence[Tensor]) -> str:
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in inputs)


class _Watch(TorchDispatchMode):
    """The coarsest floating dtype, and the first operation that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest: torch.dtype | None = None
        self.random = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not self.random:
            self.random = str(func)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point:
                seen = [leaf.dtype, *([self.coarsest] if self.coarsest else [])]
                self.coarsest = max(seen, key=lambda d: torch.finfo(d).eps)
        return out


@contextmanager
def _outside_of_the_capture() -> Iterator[None]:
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
    ):
        yield
