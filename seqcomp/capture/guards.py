"""What torch.export would silently lose is refused while the forward is traced.

A capture records operations. The backward of a custom autograd.Function and hooks on tensors are
not operations: the export traces through them and their gradients would be other ones.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from seqcomp.capture.forwards import standing_in
from seqcomp.diagnostics import PlanError, diagnostic


@contextlib.contextmanager
def refuse_hidden_gradients(root: torch.nn.Module) -> Iterator[None]:
    """Raises PlanError SC302 from inside the traced forward of `root`, on this thread only."""
    paths = {id(module): path for path, module in root.named_modules()}
    here = threading.get_ident()
    module = torch.autograd.function
    question, register = module._is_setup_context_defined, torch.Tensor.register_hook

    def watched_question(setup_context: Any) -> bool:
        # Function.apply asks this first, also where it was bound before (`swish = Swish.apply`).
        given = sys._getframe(1).f_locals
        values = (given.get("args"), given.get("kwargs"))
        if threading.get_ident() == here and _differentiates(values):
            where = _running(paths)
            raise _error(
                where,
                f"autograd.Function {given['cls'].__qualname__}",
                "operations that autograd differentiates itself",
                "write the forward with plain operations (torch.utils.checkpoint: "
                "use_reentrant=False); where the module treats each token alone, run it as it is: "
                f"overrides: [{{match: {where!r}, token_local: true}}]",
            )
        return question(setup_context)

    def watched_register(self: torch.Tensor, hook: Any) -> Any:
        if threading.get_ident() == here:
            raise _error(
                _running(paths),
                "Tensor.register_hook inside the forward",
                "no hooks on intermediate values",
                "register hooks on parameters, outside of the forward",
            )
        return register(self, hook)

    module._is_setup_context_defined = watched_question
    torch.Tensor.register_hook = watched_register
    try:
        yield
    finally:
        module._is_setup_context_defined = question
        torch.Tensor.register_hook = register


@contextlib.contextmanager
def refuse_kept_values(module: torch.nn.Module) -> Iterator[None]:
    """Raises PlanError SC307 where the forward leaves tensors in attributes (`self.aux = ...`).

    A compiled call does not run that code, so the attribute would never change again. What the
    traced forward left behind is removed. torch.export puts attributes back by itself, so the
    look is from inside the traced call.
    """
    forward = module.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        before = {
            path: {name: _frozen(value) for name, value in vars(sub).items()}
            for path, sub in module.named_modules()
        }
        result = forward(*args, **kwargs)
        kept = _kept_values(module, before)
        if kept:
            raise PlanError(
                [
                    diagnostic(
                        "SC307",
                        where=name,
                        found="forward keeps a tensor in this attribute",
                        legal="a forward that returns what it computes",
                        help="return the value as an output of forward",
                    )
                    for name in kept
                ]
            )
        return result

    watched.__signature__ = inspect.signature(forward)
    with standing_in(module, watched):
        yield


def _kept_values(module: torch.nn.Module, before: dict[str, dict[str, Any]]) -> list[str]:
    kept = []
    for path, sub in module.named_modules():
        known = before.get(path, {})
        for name, value in list(vars(sub).items()):
            if name in _OWN or not _has_tensor(value) or _same(known.get(name), value):
                continue
            # A recurrent layer lists its own parameters there, which a capture replaces.
            if not (isinstance(sub, torch.nn.RNNBase) and name == "_flat_weights"):
                kept.append(f"{path}.{name}".lstrip("."))
            _put_back(sub, name, known.get(name))
    return kept


_OWN = ("_parameters", "_buffers", "_modules")


def _frozen(value: Any) -> tuple[Any, Any]:
    """A value and a copy of what a container held."""
    return value, (value.copy() if isinstance(value, list | dict | set) else None)


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _same(known: tuple[Any, Any] | None, value: Any) -> bool:
    if known is None or known[0] is not value:
        return False
    copy = known[1]
    return copy is None or (
        len(copy) == len(value)
        and all(a is b for a, b in zip(_items(copy), _items(value), strict=True))
    )


def _items(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


def _put_back(sub: torch.nn.Module, name: str, known: tuple[Any, Any] | None) -> None:
    if known is None:
        vars(sub).pop(name)
        return
    value, copy = known
    if isinstance(value, list):
        value[:] = copy
    elif isinstance(value, dict | set):
        value.clear()
        value.update(copy)
    vars(sub)[name] = value


def _differentiates(values: Any) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(values)
    )


def _running(paths: Mapping[int, str]) -> str:
    """Path of the module whose forward the caller's caller runs in."""
    frame = sys._getframe(2)
    while frame is not None:
        path = paths.get(id(frame.f_locals.get("self")))
        if path is not None:
            return path or "the model's forward"
        frame = frame.f_back
    return "the model's forward"


def _error(where: str, found: str, legal: str, help_text: str) -> PlanError:
    return PlanError([diagnostic("SC302", where=where, found=found, legal=legal, help=help_text)])
