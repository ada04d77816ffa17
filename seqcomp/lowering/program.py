"""A lowered program: rank-independent code, and its installation into a module for one rank."""

from __future__ import annotations

import contextlib
import textwrap
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqcomp.capture.export import Capture
from seqcomp.capture.recognise import AttentionInfo
from seqcomp.diagnostics import Diagnostic
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.lowering import ops
from seqcomp.lowering.memory import KEPT, Rerun
from seqcomp.lowering.parameters import Cut
from seqcomp.lowering.scopes import Piece
from seqcomp.lowering.snapshot import Snapshot
from seqcomp.lowering.variants import CallSizes
from seqcomp.plan.facts import ModelFacts

_SLOT = "_seqcomp_pieces"
MAX_PROGRAMS = 32
_KEPT = "_seqcomp_kept_forward"


@dataclass(frozen=True)
class Program:
    """One captured variant, lowered. `flat` is the whole local graph, for reading."""

    name: str
    capture: Capture
    flat: torch.fx.Graph
    pieces: tuple[Piece, ...]
    root: Piece
    out_spec: pytree.TreeSpec
    attentions: tuple[AttentionInfo, ...]
    findings: tuple[Diagnostic, ...]
    layout: SequenceLayout
    facts: ModelFacts
    cuts: Mapping[str, Cut]
    grad: bool  # lowered with gradients on
    aliases: Mapping[str, Sequence[str]]  # all names of each tensor that has several
    checkpoints: Mapping[tuple[str, str], Rerun]  # by path and token of calls that run again
    fsdp_units: tuple[str, ...] | None = None  # modules that may be sharded by themselves (fsdp)
    unmet: tuple[Diagnostic, ...] = ()  # why it may be compiled, but not called
    kept: Snapshot | None = None  # the global graph, where the verifier asked for it

    def sizes(self, called: CallSizes) -> CallSizes:
        """The sizes of a call, with the length of a sequence that the model makes itself."""
        if called.length is not None:
            return called
        return replace(called, length=self.facts.length)

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Joint groups that the program talks to."""
        used = dict.fromkeys(
            n.target.axes_used() for n in self.flat.nodes if isinstance(n.target, ops.Op)
        )
        return tuple(axes for axes in used if axes)


class ProgramCache:
    """Programs by what they depend on; ranks that share a process share one cache."""

    def __init__(self) -> None:
        self._programs: dict[Any, Program] = {}
        self._made = 0
        self._lock = threading.Lock()  # captures change state of torch that threads share

    def get(self, key: Any, build: Callable[[str], Program]) -> Program:
        with self._lock:
            if key not in self._programs:
                self._programs[key] = build(f"p{self._made}")
                self._made += 1
                if len(self._programs) > MAX_PROGRAMS:
                    del self._programs[next(iter(self._programs))]
            return self._programs[key]


def install(program: Program, module: torch.nn.Module, rank: ops.RankBinding) -> Callable[..., Any]:
    """Binds every piece to a rank and puts it into its module. Returns the root's function.

    The modules keep class, parameters and attributes; only the instance's forward is replaced by
    one that runs a piece when called with a piece's token, and the original otherwise.
    """
    bound: dict[ops.Op, Callable[..., Any]] = {}
    traceable = ops.Traceable(rank, program.flat)
    keeps = any(rerun.how.keeps for rerun in program.checkpoints.values())

    def bind(op: ops.Op) -> Callable[..., Any]:
        if op not in bound:
            run = op.bind(rank)
            run = rank.recompute.exchange(run) if keeps and isinstance(op, KEPT) else run
            bound[op] = traceable(op, run)
        return bound[op]

    made = Forwards()
    root: Callable[..., Any] | None = None
    for piece in program.pieces:
        forward = made.get(piece, bind)
        rerun = program.checkpoints.get((piece.path, piece.token))
        if rerun is not None:
            forward = rank.recompute.checkpointed(forward, rerun.how, piece.weights)
        if piece.path:
            _slot(module.get_submodule(piece.path))[piece.token] = forward
        if piece is program.root:
            root = forward
    assert root is not None
    return root


class Forwards:
    """Functions of pieces. Pieces of the same code share one code object, so that a compiler that
    knows it for one layer knows it for all: what differs between them is bound to names in it."""

    def __init__(self) -> None:
        self._makers: dict[tuple[object, ...], Callable[..., Callable[..., Any]]] = {}

    def get(self, piece: Piece, bind: Callable[[ops.Op], Callable[..., Any]]) -> Callable[..., Any]:
        """The function of `piece`, whose operations `bind` binds."""
        own = {name: bind(item) for name, item in piece.names.items() if isinstance(item, ops.Op)}
        shared = {name: item for name, item in piece.names.items() if name not in own}
        key = (piece.code, *own, *((name, id(item)) for name, item in shared.items()))
        if key not in self._makers:
            code = textwrap.indent(piece.code, "    ")
            text = f"def make({', '.join(own)}):\n{code}\n    return forward\n"
            exec(compile(text, f"<seqcomp {piece.path or 'root'}>", "exec"), shared)
            self._makers[key] = shared["make"]
        return self._makers[key](**own)


class Pieces(dict[str, Callable[..., Any]]):
    """Forwards of one module by token. A copy of the module gets none and is a plain module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Pieces:
        return Pieces()

    def __reduce__(self) -> tuple[Any, ...]:
        return Pieces, ()


def _slot(module: torch.nn.Module) -> Pieces:
    pieces: Pieces | None = vars(module).get(_SLOT)
    if pieces is None:
        pieces = vars(module)[_SLOT] = Pieces()
        replace_forward(module, _forward)
    return pieces


def _forward(
    self: torch.nn.Module,
    *args: Any,
    seqcomp: str = "",
    seqcomp_weights: tuple[Tensor, ...] = (),
    **kwargs: Any,
) -> Any:
    if not seqcomp:
        return original_forward(self)(*args, **kwargs)
    piece = vars(self)[_SLOT].get(seqcomp)
    if piece is None:
        # Running the original code on local tensors instead would be silently wrong.
        raise RuntimeError(
            f"{seqcomp} of a {type(self).__name__} was dropped before its backward recomputed it"
        )
    return piece(self, *args, *seqcomp_weights)


# Pickle stores a bound method by this name: what is loaded is the module's own forward.
_forward.__name__ = "forward"


def replace_forward(module: torch.nn.Module, function: Callable[..., Any]) -> None:
    """Sets the instance's forward, keeping one that the instance had of its own."""
    if "forward" in vars(module):
        vars(module)[_KEPT] = vars(module)["forward"]
    # A bound method is copied with its module; see the name that the functions are given.
    vars(module)["forward"] = types.MethodType(function, module)


def original_forward(module: torch.nn.Module) -> Callable[..., Any]:
    """The forward that the module had before."""
    kept: Callable[..., Any] | None = vars(module).get(_KEPT)
    return kept if kept is not None else types.MethodType(type(module).forward, module)


def restore_forward(module: torch.nn.Module) -> None:
    """Undoes `replace_forward`."""
    vars(module).pop("forward", None)
    if _KEPT in vars(module):
        vars(module)["forward"] = vars(module).pop(_KEPT)


def forget(program: Program, module: torch.nn.Module) -> None:
    """Removes the pieces of one program."""
    for sub in module.modules():
        for piece in program.pieces:
            vars(sub).get(_SLOT, {}).pop(piece.token, None)


def uninstall(module: torch.nn.Module) -> None:
    """Removes everything that `install` put into the submodules."""
    for sub in module.modules():
        if vars(sub).pop(_SLOT, None) is not None:
            restore_forward(sub)


@contextlib.contextmanager
def original_forwards(module: torch.nn.Module, root: Callable[..., Any]) -> Iterator[None]:
    """During a capture the modules run their own code; `root` is the compiled forward."""
    compiled = [sub for sub in module.modules() if _SLOT in vars(sub)]
    for sub in (module, *compiled):
        restore_forward(sub)
    try:
        yield
    finally:
        for sub in compiled:
            replace_forward(sub, _forward)
        replace_forward(module, root)
