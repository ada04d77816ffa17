"""Functions of a rank as operations that torch.compile calls and does not look into.

What talks to other ranks cannot be traced: process groups, messages on their way and numbers of
tiles are Python objects. In a traced graph stands one operation of torch instead, which runs the
same code as without a compiler, with autograd inside; its backward is an operation too, which
differentiates what the first one recorded.

Nothing is kept here. Which function is called is a value of the graph (torch's opaque objects), so
that layers which differ in nothing else share it. A graph holds tensors otherwise: objects that go
from one function to another, and what a call leaves for its backward, hang on the memory of a
tensor that stands for them. The graph saves it as it saves activations, so it goes with its
backward, a checkpoint around it or the graph of autograd, whichever ends first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqcomp.runtime.opaque_calls import Function, Made, Shape, note_of, noted


class Thing(NamedTuple):
    """An object on its way from one function to another. Gradients go to `learn`."""

    token: Tensor
    learn: tuple[Tensor, ...]


class Opaque:
    """`run`, a function of tensors, numbers, None and lists of them, for those who trace.

    shape: of its results, which are tensors; None where it gives some other object, which comes as
    a `Thing` that is an operand of other `Opaque`. like: what `shape` depends on besides operands,
    as something that can be compared. many: the result is a list of tensors, otherwise one.
    measures: only sizes of its operands matter. keeps: see `keeps`. inside: what a graph calls
    instead of `run`.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        like: Any,
        shape: Shape | None,
        *,
        many: bool = False,
        measures: bool = False,
        keeps: bool = False,
        inside: Callable[..., Any] | None = None,
    ) -> None:
        self._run = run
        self.inside = inside or run
        self.shape = shape
        self._function = Function(self, like, keeps)
        self._gives_thing = shape is None
        self._many = many
        self._measures = measures

    def __call__(self, *args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return self.run(*args)
        operands = _Operands()
        for arg in args:
            if not operands.add(arg):
                return self._aside(*args)
        form, tensors, held, sizes = operands.given()
        learns = [torch.is_grad_enabled() and x.requires_grad for x in tensors]
        if self._gives_thing:
            learns = [learn and not self._measures for learn in learns]
            made = torch.ops.seqcomp.hold(self._function, form, learns, tensors, sizes)
            learn = tuple(x for x, learn in zip(tensors, learns, strict=True) if learn)
            return Thing(made, learn)
        device = tensors[0].device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        results, _ = torch.ops.seqcomp.call(
            self._function, form, learns, tensors, held, sizes, cast
        )
        return results if self._many else results[0]

    def run(self, *args: Any) -> Any:
        """The function itself."""
        made = self._run(*map(_value, args))
        if not self._gives_thing:
            return made
        learning = torch.is_grad_enabled() and not self._measures
        learn = tuple(x for x in args if learning and isinstance(x, Tensor) and x.requires_grad)
        return Thing(noted(Made(made, learn)), learn)

    @torch.compiler.disable
    def _aside(self, *args: Any) -> Any:
        return self.run(*args)


def _value(arg: Any) -> Any:
    return note_of(arg.token).value if isinstance(arg, Thing) else arg


class _Operands:
    """The operands of one call by kind, as an operation of torch takes them."""

    def __init__(self) -> None:
        self._form: list[str] = []
        self._tensors: list[Tensor] = []
        self._held: list[Tensor] = []
        self._learn: list[Tensor] = []
        self._sizes: list[int] = []

    def add(self, arg: Any) -> bool:
        """False for what cannot be one."""
        if isinstance(arg, Tensor):
            self._form.append("tensor")
            self._tensors.append(arg)
        elif isinstance(arg, bool) or arg is None:
            self._form.append(str(arg))
        elif isinstance(arg, int):  # what stands for one in a trace, too
            self._form.append("size")
            self._sizes.append(arg)
        elif isinstance(arg, Thing):
            self._form.append("held")
            self._held.append(arg.token)
            self._learn += arg.learn
        elif isinstance(arg, list):
            self._form.append("[")
            for item in arg:
                if not self.add(item):
                    return False
            self._form.append("]")
        else:
            return False
        return True

    def given(self) -> tuple[str, list[Tensor], list[Tensor], list[int]]:
        """Tensors that learn through an object stand behind those that are operands."""
        return " ".join(self._form), [*self._tensors, *self._learn], self._held, self._sizes
