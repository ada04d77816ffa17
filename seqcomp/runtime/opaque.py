"""Functions of a rank as operations that torch.compile calls and does not look into.

What talks to other ranks cannot be traced: process groups, messages on their way and numbers of
tiles are Python objects. In a traced graph stands one operation of torch instead, whose operands
are a tensor that says who is called, so that layers which differ in nothing else share a graph,
and the tensors and sizes of the call. It runs the same code as without a compiler, with autograd
inside; its backward is an operation too, which differentiates what the first one recorded.

A compiled graph holds tensors alone. So what a call leaves for its backward, and objects that go
from one function to another, are kept here under a number, which is a tensor of the graph: while
any copy of that tensor lives, so does what it stands for.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Shape = Callable[..., tuple[Sequence[Any], torch.dtype]]
"""From the operands of a call: sizes and dtype of its result. Is given the dtype of autocast too,
or None, as `cast`."""


class Opaque:
    """`run`, a function of tensors, numbers and None, for those who trace.

    shape: of its one result, which is a tensor; None where the result is some other object. Those
    that are `like` one another share one function, which lives as long as any of them. held:
    places of operands that are such objects. measures: only sizes of its operands matter.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        like: str,
        shape: Shape | None,
        held: frozenset[int] = frozenset(),
        measures: bool = False,
    ) -> None:
        self._run = run
        self._like = like
        self._shape = shape
        self._held = held
        self._measures = measures
        number = next(_numbers)
        self._who = torch.tensor(number)
        _functions[number] = self
        if shape is not None:
            _shapes.setdefault(like, shape)

    def __call__(self, *args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return self.run(*args)
        form: list[str] = []
        tensors: list[Tensor] = []
        sizes: list[int] = []
        for place, arg in enumerate(args):
            if isinstance(arg, Tensor):
                form.append("held" if place in self._held else "tensor")
                tensors.append(arg)
            elif isinstance(arg, int) and not isinstance(arg, bool):
                form.append("size")
                sizes.append(arg)
            elif arg is None:
                form.append("none")
            else:
                return self._aside(*args)
        spelled = " ".join(form)
        learns = [torch.is_grad_enabled() and x.requires_grad for x in tensors]
        if self._shape is None:
            if any(learns) and not self._measures:
                return self._aside(*args)  # a gradient would have to find its way through it
            given = [x.detach() for x in tensors]
            return torch.ops.seqcomp.hold(self._who, spelled, given, sizes)
        device = tensors[0].device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return torch.ops.seqcomp.call(self._who, self._like, spelled, learns, tensors, sizes, cast)[
            0
        ]

    def run(self, *args: Any) -> Any:
        """The function itself; held operands may be given as what stands for them."""
        if self._held:
            args = tuple(
                _kept[int(x)][1] if place in self._held and isinstance(x, Tensor) else x
                for place, x in enumerate(args)
            )
        return self._run(*args)

    @torch.compiler.disable
    def _aside(self, *args: Any) -> Any:
        return self.run(*args)


# Operations are given numbers and strings, so something must know what these stand for.
_numbers = itertools.count()
_functions: weakref.WeakValueDictionary[int, Opaque] = weakref.WeakValueDictionary()
_shapes: weakref.WeakValueDictionary[str, Shape] = weakref.WeakValueDictionary()
_kept: dict[int, tuple[StorageWeakRef, Any]] = {}

_DISPATCH = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
"""What a thread dispatches with outside of every operation."""

torch.library.define(
    "seqcomp::call",
    "(Tensor who, str like, str form, bool[] learns, Tensor[] tensors, SymInt[] sizes, "
    "ScalarType? cast) -> (Tensor, Tensor)",
)
torch.library.define(
    "seqcomp::pull",
    "(Tensor token, Tensor gradient, int[] dims, SymInt[] shapes, str dtypes) -> Tensor[]",
)
torch.library.define(
    "seqcomp::hold", "(Tensor who, str form, Tensor[] tensors, SymInt[] sizes) -> Tensor"
)


def _call(
    who: Tensor,
    like: str,
    form: str,
    learns: Sequence[bool],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    cast: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    function = _functions[int(who)]
    given = [
        x.detach().requires_grad_() if learn else x
        for x, learn in zip(tensors, learns, strict=True)
    ]
    # A compiler writes over what its graph needs no more: what the backward needs is our own.
    taken = set(map(_memory, tensors))

    def saved(x: Tensor) -> Tensor:
        x = x.clone() if _memory(x) in taken else x
        taken.add(_memory(x))
        return x

    with (
        _as_outside(any(learns), tensors[0].device.type, cast),
        torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x),
    ):
        made = function.run(*_arguments(form, given, sizes))
    result = made.detach().contiguous()
    if _memory(result) in taken:
        result = result.clone()
    if not any(learns):
        return result, _token(None)
    return result, _token((made, [x for x, learn in zip(given, learns, strict=True) if learn]))


def _pull(
    token: Tensor, gradient: Tensor, dims: Sequence[int], shapes: Sequence[int], dtypes: str
) -> list[Tensor]:
    _drop_unused()
    made, inputs = _kept[int(token)][1]
    # The graph may be differentiated again; it goes with its token.
    with _as_outside(False, gradient.device.type, None):
        found = torch.autograd.grad(made, inputs, gradient, retain_graph=True, allow_unused=True)
    taken, results = {_memory(gradient)}, []
    for x, g in zip(inputs, found, strict=True):
        result = torch.zeros_like(x) if g is None else g.contiguous()
        results.append(result.clone() if _memory(result) in taken else result)
        taken.add(_memory(results[-1]))
    return results


def _hold(who: Tensor, form: str, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    with _as_outside(False, "cpu", None):
        given = [x if x.dtype == torch.int64 and x.dim() == 0 else x.clone() for x in tensors]
        return _token(_functions[int(who)].run(*_arguments(form, given, sizes)))


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _arguments(form: str, tensors: Sequence[Any], sizes: Sequence[Any]) -> list[Any]:
    next_tensor, next_size = iter(tensors), iter(sizes)
    how: dict[str, Callable[[], Any]] = {
        "tensor": lambda: next(next_tensor),
        "held": lambda: next(next_tensor),
        "size": lambda: next(next_size),
        "none": lambda: None,
    }
    return [how[kind]() for kind in form.split()]


def _token(value: Any) -> Tensor:
    """A tensor that keeps `value`."""
    _drop_unused()
    number = next(_numbers)
    token = torch.tensor(number)
    if value is not None:
        _kept[number] = (StorageWeakRef(token.untyped_storage()), value)
    return token


def _drop_unused() -> None:
    for number in [n for n, (storage, _) in list(_kept.items()) if storage.expired()]:
        _kept.pop(number, None)


@contextlib.contextmanager
def _as_outside(learning: bool, device: str, cast: torch.dtype | None) -> Iterator[None]:
    """Autograd and autocast as for code that is not inside an operation."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C._ForceDispatchKeyGuard(*_DISPATCH))
        stack.enter_context(torch.set_grad_enabled(learning))
        if cast is not None:
            stack.enter_context(torch.autocast(device, cast))
        yield


def _imagined_call(
    who: Tensor,
    like: str,
    form: str,
    learns: Sequence[bool],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    cast: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    shape, dtype = _shapes[like](*_arguments(form, tensors, sizes), cast=cast)
    return tensors[0].new_empty(shape, dtype=dtype), who.new_empty(())


def _imagined_pull(
    token: Tensor, gradient: Tensor, dims: Sequence[int], shapes: Sequence[int], dtypes: str
) -> list[Tensor]:
    left = iter(shapes)
    return [
        gradient.new_empty([next(left) for _ in range(n)], dtype=getattr(torch, name))
        for n, name in zip(dims, dtypes.split(), strict=True)
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    learns, tensors = inputs[3], inputs[4]
    learning = [x for x, learn in zip(tensors, learns, strict=True) if learn]
    ctx.save_for_backward(output[1])
    ctx.learns = learns
    ctx.none = [] if not inputs[5] else None  # torch takes an empty list for one of tensors
    ctx.dims = [x.dim() for x in learning]
    ctx.shapes = [n for x in learning for n in x.shape]
    ctx.dtypes = " ".join(str(x.dtype).removeprefix("torch.") for x in learning)


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    (token,) = ctx.saved_tensors
    pulled = torch.ops.seqcomp.pull(token, gradient, ctx.dims, ctx.shapes, ctx.dtypes)
    found = iter(pulled)
    gradients = [next(found) if learn else None for learn in ctx.learns]
    return None, None, None, None, gradients, ctx.none, None


torch.library.impl("seqcomp::call", "CompositeExplicitAutograd", _call)
torch.library.impl("seqcomp::pull", "CompositeExplicitAutograd", _pull)
torch.library.impl("seqcomp::hold", "CompositeExplicitAutograd", _hold)
torch.library.register_fake("seqcomp::call", _imagined_call)
torch.library.register_fake("seqcomp::pull", _imagined_pull)
torch.library.register_fake("seqcomp::hold", lambda who, *_: who.new_empty(()))
torch.library.register_autograd("seqcomp::call", _backward, setup_context=_setup)
