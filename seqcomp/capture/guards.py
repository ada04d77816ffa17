"""What torch.export would silently lose is refused while the forward is traced.

A capture records operations. The backward of a custom autograd.Function and hooks on tensors are
not operations: the export traces through them and their gradients would be other ones.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from seqcomp.diagnostics import PlanError, diagnostic


@contextlib.contextmanager
def refuse_hidden_gradients() -> Iterator[None]:
    """Raises PlanError SC302 from inside the traced forward, on this thread only."""
    here = threading.get_ident()
    apply, register = torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook

    def watched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here and _differentiates((args, kwargs)):
            raise _error(
                f"autograd.Function {cls.__qualname__}",
                "operations that autograd differentiates itself",
                "write the forward with plain operations (torch.utils.checkpoint: "
                "use_reentrant=False)",
            )
        return apply.__get__(None, cls)(*args, **kwargs)

    def watched_register(self: torch.Tensor, hook: Any) -> Any:
        if threading.get_ident() == here:
            raise _error(
                "Tensor.register_hook inside the forward",
                "no hooks on intermediate values",
                "register hooks on parameters, outside of the forward",
            )
        return register(self, hook)

    torch.autograd.Function.apply = classmethod(watched_apply)
    torch.Tensor.register_hook = watched_register
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply
        torch.Tensor.register_hook = register


def _differentiates(values: Any) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(values)
    )


def _error(found: str, legal: str, help_text: str) -> PlanError:
    return PlanError(
        [diagnostic("SC302", where="the model's forward", found=found, legal=legal, help=help_text)]
    )
