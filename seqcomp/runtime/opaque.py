"""Functions of a rank as operations that torch.compile calls and does not look into.

What talks to other ranks cannot be traced: process groups, messages on their way and numbers of
tiles are Python objects. In a traced graph stands one operation of torch instead, which runs the
same code as without a compiler, with autograd inside; its backward is an operation too, which
differentiates what the first one recorded.

Nothing is kept here. Which function is called, and objects that go from one to another, are values
of the graph (torch's opaque objects), so that layers which differ in nothing else share it. What a
call leaves for its backward hangs on the memory of a tensor that the graph saves as it saves
activations: it goes with its backward, a checkpoint around it or the graph of autograd, whichever
ends first.

The one file on torch's private interface for opaque objects.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._library.fake_class_registry import maybe_to_fake_obj
from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
from torch._opaque_base import OpaqueBase

Form = tuple[Sequence[Any], torch.dtype]
"""Sizes and dtype of a result."""

Shape = Callable[..., Sequence[Form]]
"""From the operands of a call: the form of each result. Is given the dtype of autocast too, or
None, as `cast`."""


class _Function(OpaqueBase):
    """Who is called. Functions that are `like` one another share a graph.

    keeps: what it gives is not to be made again in a region that runs again and keeps anything.
    It does not hold what it stands for: torch remembers for good what it imagined calls with.
    """

    def __init__(self, who: Opaque | None, like: Any, keeps: bool) -> None:
        self._who = None if who is None else weakref.ref(who)
        self.like = like
        self.keeps = keeps

    @property
    def who(self) -> Opaque:
        who = self._who() if self._who is not None else None
        assert who is not None, "a graph outlives what it calls"
        return who

    def __reduce__(self) -> tuple[Any, ...]:
        # What a cache of compiled graphs must know of it; there is nothing to call in a copy.
        return _Function, (None, self.like, self.keeps)


class _Made:
    """An object, and the tensors that take what is learnt through it."""

    def __init__(self, value: Any, learnt: tuple[Tensor, ...]) -> None:
        self.value = value
        self.learnt = learnt


class _Held(OpaqueBase):
    """What stands for an object in a graph; made there it holds it, made outside it does not."""

    def __init__(self, made: _Made | None, *, weakly: bool = False) -> None:
        self._made: Callable[[], _Made | None] = (
            weakref.ref(made) if weakly and made is not None else lambda: made
        )

    @property
    def made(self) -> _Made:
        made = self._made()
        assert made is not None, "an object that is gone"
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _Held, (None,)


class _Tape:
    """What a call leaves for its backward: its results, and what they are differentiated by."""

    def __init__(self, made: Sequence[Tensor], by: Sequence[Tensor]) -> None:
        self.made = made
        self.by = by

    def on_a_token(self) -> Tensor:
        """A tensor that keeps the tape: torch keeps what is noted on a memory as long as that."""
        token = _blank_token()
        vars(token.untyped_storage())[_NOTE] = self
        return token

    @staticmethod
    def of(token: Tensor) -> _Tape:
        tape: _Tape = vars(token.untyped_storage())[_NOTE]
        return tape


_NOTE = "seqcomp_tape"


def _blank_token() -> Tensor:
    return torch.empty((), dtype=torch.int64)


class Thing(NamedTuple):
    """An object on its way from one function to another. Gradients go to `learn`."""

    held: _Held
    learn: tuple[Tensor, ...]
    made: _Made | None  # outside of graphs


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
        self._function = _Function(self, like, keeps)
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
            return Thing(made, learn, None)
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
        thing = _Made(made, learn)
        return Thing(_Held(thing, weakly=True), learn, thing)

    @torch.compiler.disable
    def _aside(self, *args: Any) -> Any:
        return self.run(*args)


def keeps(op: Any, args: Sequence[Any]) -> bool:
    """Whether this operation of a traced graph is a function whose results are dear."""
    return op is torch.ops.seqcomp.call.default and bool(args[0].real_obj.keeps)


def _value(arg: Any) -> Any:
    return arg.held.made.value if isinstance(arg, Thing) else arg


class _Operands:
    """The operands of one call by kind, as an operation of torch takes them."""

    def __init__(self) -> None:
        self._form: list[str] = []
        self._tensors: list[Tensor] = []
        self._held: list[_Held] = []
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
            self._held.append(arg.held)
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

    def given(self) -> tuple[str, list[Tensor], list[_Held], list[int]]:
        """Tensors that learn through an object stand behind those that are operands."""
        return " ".join(self._form), [*self._tensors, *self._learn], self._held, self._sizes


def _arguments(
    form: str, tensors: Sequence[Any], held: Sequence[Any], sizes: Sequence[Any]
) -> list[Any]:
    left = {"tensor": iter(tensors), "held": iter(held), "size": iter(sizes)}
    constants = {"None": None, "True": True, "False": False}
    stack: list[list[Any]] = [[]]
    for kind in form.split():
        if kind == "[":
            stack.append([])
        elif kind == "]":
            stack[-2].append(stack.pop())
        else:
            stack[-1].append(constants[kind] if kind in constants else next(left[kind]))
    return stack[0]


_DISPATCH = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
"""What a thread dispatches with outside of every operation."""


def _call(
    who: _Function,
    form: str,
    learns: Sequence[bool],
    tensors: Sequence[Tensor],
    held: Sequence[_Held],
    sizes: Sequence[int],
    cast: torch.dtype | None,
) -> tuple[list[Tensor], Tensor]:
    given = [
        x.detach().requires_grad_() if learn else x
        for x, learn in zip(tensors, learns, strict=True)
    ]
    things = [x.made for x in held]
    learnt = [leaf for thing in things for leaf in thing.learnt]
    given = [*given[: len(given) - len(learnt)], *learnt]
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
        made = who.who.inside(*_arguments(form, given, [x.value for x in things], sizes))
    made = [made] if isinstance(made, Tensor) else made
    by = [x for x, learn in zip(given, learns, strict=True) if learn]
    return _own(made, taken), _Tape(made if by else (), by).on_a_token()


def _pull(
    token: Tensor,
    gradients: Sequence[Tensor],
    dims: Sequence[int],
    shapes: Sequence[int],
    dtypes: str,
) -> list[Tensor]:
    tape = _Tape.of(token)
    if not tape.by:
        raise RuntimeError(
            "backward through the same graph a second time; keep it with retain_graph=True"
        )
    pairs = [(x, g) for x, g in zip(tape.made, gradients, strict=True) if x.requires_grad]
    made, wanted = zip(*pairs, strict=True)
    with _as_outside(False, gradients[0].device.type, None):
        found = torch.autograd.grad(made, tape.by, wanted, retain_graph=True, allow_unused=True)
    results = [torch.zeros_like(x) if g is None else g for x, g in zip(tape.by, found, strict=True)]
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        tape.made = tape.by = ()
    return _own(results, set(map(_memory, gradients)))


def _hold(
    who: _Function,
    form: str,
    learns: Sequence[bool],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
) -> _Held:
    given = [
        x.detach().clone().requires_grad_(learn) for x, learn in zip(tensors, learns, strict=True)
    ]
    with _as_outside(any(learns), "cpu", None):
        made = who.who.inside(*_arguments(form, given, (), sizes))
    learnt = tuple(x for x, learn in zip(given, learns, strict=True) if learn)
    return _Held(_Made(made, learnt))


def _own(results: Sequence[Tensor], taken: set[int]) -> list[Tensor]:
    """Contiguous results that share memory neither with each other nor with what is taken."""
    own = []
    for result in results:
        x = result.detach().contiguous()
        own.append(x.clone() if _memory(x) in taken else x)
        taken.add(_memory(own[-1]))
    return own


def in_backward() -> bool:
    """Whether autograd's engine runs this thread now."""
    return torch._C._current_graph_task_id() != -1


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


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
    who: Any,
    form: str,
    learns: Sequence[bool],
    tensors: Sequence[Tensor],
    held: Sequence[Any],
    sizes: Sequence[int],
    cast: torch.dtype | None,
) -> tuple[list[Tensor], Tensor]:
    # Its form is the same for all that are `like` it, which a guard sees to.
    forms = who.real_obj.who.shape(*_arguments(form, tensors, [None] * len(held), sizes), cast=cast)
    return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in forms], _blank_token()


def _imagined_pull(
    token: Tensor,
    gradients: Sequence[Tensor],
    dims: Sequence[int],
    shapes: Sequence[int],
    dtypes: str,
) -> list[Tensor]:
    left = iter(shapes)
    return [
        gradients[0].new_empty([next(left) for _ in range(n)], dtype=getattr(torch, name))
        for n, name in zip(dims, dtypes.split(), strict=True)
    ]


def _imagined_hold(*_: Any) -> Any:
    return maybe_to_fake_obj(detect_fake_mode(), _Held(None))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor]) -> None:
    learns, tensors = inputs[2], inputs[3]
    learning = [x for x, learn in zip(tensors, learns, strict=True) if learn]
    ctx.save_for_backward(output[1])
    ctx.made = [(x.shape, x.dtype, x.device) for x in output[0]]
    ctx.learns = learns
    # torch takes an empty list for one of tensors, which has as many gradients.
    ctx.none = [None if given else [] for given in inputs[4:6]]
    ctx.dims = [x.dim() for x in learning]
    ctx.shapes = [n for x in learning for n in x.shape]
    ctx.dtypes = " ".join(str(x.dtype).removeprefix("torch.") for x in learning)


def _backward(ctx: Any, gradients: list[Tensor | None], _: Any) -> tuple[Any, ...]:
    whole = [
        torch.zeros(shape, dtype=dtype, device=device) if g is None else g
        for g, (shape, dtype, device) in zip(gradients, ctx.made, strict=True)
    ]
    (token,) = ctx.saved_tensors
    pulled = torch.ops.seqcomp.pull(token, whole, ctx.dims, ctx.shapes, ctx.dtypes)
    found = iter(pulled)
    back = [next(found) if learn else None for learn in ctx.learns]
    return None, None, None, back, *ctx.none, None


register_opaque_type(_Function, typ="reference", guard_fn=lambda who: [who.like, who.keeps])
register_opaque_type(_Held, typ="reference")
_FUNCTION, _HELD = map(get_opaque_type_name, (_Function, _Held))

torch.library.define(
    "seqcomp::call",
    f"({_FUNCTION} who, str form, bool[] learns, Tensor[] tensors, {_HELD}[] held, "
    f"SymInt[] sizes, ScalarType? cast) -> (Tensor[], Tensor)",
)
torch.library.define(
    "seqcomp::pull",
    "(Tensor token, Tensor[] gradients, int[] dims, SymInt[] shapes, str dtypes) -> Tensor[]",
)
torch.library.define(
    "seqcomp::hold",
    f"({_FUNCTION} who, str form, bool[] learns, Tensor[] tensors, SymInt[] sizes) -> {_HELD}",
)
torch.library.impl("seqcomp::call", "CompositeExplicitAutograd", _call)
torch.library.impl("seqcomp::pull", "CompositeExplicitAutograd", _pull)
torch.library.impl("seqcomp::hold", "CompositeExplicitAutograd", _hold)
torch.library.register_fake("seqcomp::call", _imagined_call)
torch.library.register_fake("seqcomp::pull", _imagined_pull)
torch.library.register_fake("seqcomp::hold", _imagined_hold)
torch.library.register_autograd("seqcomp::call", _backward, setup_context=_setup)
