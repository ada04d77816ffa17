"""The operations of torch that stand in traced graphs for functions of a rank.

The one file on torch's private interface for opaque objects: see opaque.py for what they are.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
from torch._opaque_base import OpaqueBase

Form = tuple[Sequence[Any], torch.dtype]
"""Sizes and dtype of a result."""

Shape = Callable[..., Sequence[Form]]
"""From the operands of a call: the form of each result. Is given the dtype of autocast too, or
None, as `cast`."""


class Who(Protocol):
    """A function as graphs know it."""

    inside: Callable[..., Any]
    """What is called. Gives a tensor, a list of tensors or, without `shape`, another object."""
    shape: Shape | None


class Function(OpaqueBase):
    """Who is called. Functions that are `like` one another share a graph.

    keeps: what it gives is not to be made again in a region that runs again and keeps anything.
    It does not hold what it stands for: torch remembers for good what it imagined calls with.
    """

    def __init__(self, who: Who | None, like: Any, keeps: bool) -> None:
        self._who = None if who is None else weakref.ref(who)
        self.like = like
        self.keeps = keeps

    @property
    def who(self) -> Who:
        who = self._who() if self._who is not None else None
        assert who is not None, "a graph outlives what it calls"
        return who

    def __reduce__(self) -> tuple[Any, ...]:
        # What a cache of compiled graphs must know of it; there is nothing to call in a copy.
        return Function, (None, self.like, self.keeps)


class Made(NamedTuple):
    """An object, and the tensors that take what is learnt through it."""

    value: Any
    learnt: tuple[Tensor, ...]


class Tape:
    """What a call leaves for its backward: its results, and what they are differentiated by."""

    def __init__(self, made: Sequence[Tensor], by: Sequence[Tensor]) -> None:
        self.made = made
        self.by = by


_NOTE = "seqcomp_note"


def noted(value: Any) -> Tensor:
    """A tensor that stands for an object: torch keeps what is noted on a memory as long as that."""
    token = _blank_token()
    vars(token.untyped_storage())[_NOTE] = value
    return token


def note_of(token: Tensor) -> Any:
    """What a tensor stands for, whatever view or alias of it this is."""
    return vars(token.untyped_storage())[_NOTE]


def _blank_token() -> Tensor:
    return torch.empty((), dtype=torch.int64)


def keeps(op: Any, args: Sequence[Any]) -> bool:
    """Whether this operation of a traced graph is a function whose results are dear."""
    return op is torch.ops.seqcomp.call.default and bool(args[0].real_obj.keeps)


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
    who: Function,
    form: str,
    learns: Sequence[bool],
    tensors: Sequence[Tensor],
    held: Sequence[Tensor],
    sizes: Sequence[int],
    cast: torch.dtype | None,
) -> tuple[list[Tensor], Tensor]:
    given = [
        x.detach().requires_grad_() if learn else x
        for x, learn in zip(tensors, learns, strict=True)
    ]
    things: list[Made] = [note_of(token) for token in held]
    learnt = [leaf for thing in things for leaf in thing.learnt]
    given = [*given[: len(given) - len(learnt)], *learnt]
    # A compiler writes over what its graph needs no more: what the backward needs is our own.
    taken = set(map(_memory, tensors))

    def saved(x: Tensor) -> Tensor:
        x = x.clone() if _memory(x) in taken else x
        taken.add(_memory(x))
        # A result that its own function saves would hold that function, and both live for good.
        return x.detach()

    with (
        _as_outside(any(learns), tensors[0].device.type, cast),
        torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x),
    ):
        made = who.who.inside(*_arguments(form, given, [x.value for x in things], sizes))
    made = [made] if isinstance(made, Tensor) else made
    by = [x for x, learn in zip(given, learns, strict=True) if learn]
    return _own(made, taken), noted(Tape(made if by else (), by))


def _pull(
    token: Tensor,
    gradients: Sequence[Tensor],
    dims: Sequence[int],
    shapes: Sequence[int],
    dtypes: str,
) -> list[Tensor]:
    tape: Tape = note_of(token)
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
    who: Function,
    form: str,
    learns: Sequence[bool],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
) -> Tensor:
    given = [
        x.detach().clone().requires_grad_(learn) for x, learn in zip(tensors, learns, strict=True)
    ]
    with _as_outside(any(learns), "cpu", None):
        made = who.who.inside(*_arguments(form, given, (), sizes))
    learnt = tuple(x for x, learn in zip(given, learns, strict=True) if learn)
    return noted(Made(made, learnt))


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


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor]) -> None:
    learns, tensors = inputs[2], inputs[3]
    learning = [x for x, learn in zip(tensors, learns, strict=True) if learn]
    ctx.save_for_backward(output[1])
    ctx.made = [(x.shape, x.dtype, x.device) for x in output[0]]
    ctx.learns = learns
    # torch takes an empty list for one of tensors, which has as many gradients.
    ctx.none = [None] * len(inputs[4]), None if inputs[5] else []
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


register_opaque_type(Function, typ="reference", guard_fn=lambda who: [who.like, who.keeps])
_FUNCTION = get_opaque_type_name(Function)

torch.library.define(
    "seqcomp::call",
    f"({_FUNCTION} who, str form, bool[] learns, Tensor[] tensors, Tensor[] held, "
    f"SymInt[] sizes, ScalarType? cast) -> (Tensor[], Tensor)",
)
torch.library.define(
    "seqcomp::pull",
    "(Tensor token, Tensor[] gradients, int[] dims, SymInt[] shapes, str dtypes) -> Tensor[]",
)
torch.library.define(
    "seqcomp::hold",
    f"({_FUNCTION} who, str form, bool[] learns, Tensor[] tensors, SymInt[] sizes) -> Tensor",
)
torch.library.impl("seqcomp::call", "CompositeExplicitAutograd", _call)
torch.library.impl("seqcomp::pull", "CompositeExplicitAutograd", _pull)
torch.library.impl("seqcomp::hold", "CompositeExplicitAutograd", _hold)
torch.library.register_fake("seqcomp::call", _imagined_call)
torch.library.register_fake("seqcomp::pull", _imagined_pull)
torch.library.register_fake("seqcomp::hold", lambda *_: _blank_token())
torch.library.register_autograd("seqcomp::call", _backward, setup_context=_setup)
