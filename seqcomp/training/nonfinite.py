"""Finds where the first NaN or infinity came from: a debug option, one check per module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree


class NonFiniteError(RuntimeError):
    """A value that is not finite; the same text on all ranks."""


@dataclass(frozen=True)
class Found:
    """Where on one rank it was first: `place` is a module, or a parameter, and what of it."""

    rank: int
    order: int
    place: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.place}"


class NonFiniteWatch:
    """Looks at the outputs of all modules, their gradients, and those of parameters.

    Compile the module first: hooks are not captured. Modules inside are done before the ones around
    them, so the first place is the innermost. Each look waits for the device: for debugging only.

    ```python
    with NonFiniteWatch(model) as watch:
        for step, batch in enumerate(batches):
            model(**batch).loss.backward()
            watch.check(step)
    ```
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first: str | None = None
        self._looks = self._order = 0
        self._remove: list[Callable[[], None]] = []

    def __enter__(self) -> NonFiniteWatch:
        for name, module in self._model.named_modules():
            hook = module.register_forward_hook(self._output(name or type(module).__name__))
            self._remove.append(hook.remove)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._parameter(name))
                self._remove.append(hook.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for remove in self._remove:
            remove()
        self._remove.clear()

    def check(self, step: int) -> None:
        """After a step. Collective over the default process group, where there is one.

        Raises NonFiniteError that says where each rank that saw one saw its first.
        """
        alone = not (dist.is_available() and dist.is_initialized())
        mine = None
        if self._first is not None:
            mine = Found(0 if alone else dist.get_rank(), self._order, self._first)
        self._first, self._looks = None, 0
        everyone: list[Found | None] = [mine]
        if not alone:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
        found = sorted(filter(None, everyone), key=lambda one: (one.order, one.rank))
        if found:
            raise NonFiniteError(f"step {step}: not finite, {'; '.join(map(str, found))}")

    def _output(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            for leaf in pytree.tree_leaves(output):
                if not isinstance(leaf, Tensor):
                    continue
                self._see(leaf.detach(), f"the output of {name}")
                if leaf.requires_grad:
                    leaf.register_hook(self._gradient(name))

        return look

    def _gradient(self, name: str) -> Callable[[Tensor], None]:
        return lambda gradient: self._see(gradient, f"the gradient of the output of {name}")

    def _parameter(self, name: str) -> Callable[[Tensor], None]:
        def look(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._see(parameter.grad, f"the gradient of {name}")

        return look

    def _see(self, x: Tensor, place: str) -> None:
        self._looks += 1
        if self._first is not None or not (x.is_floating_point() or x.is_complex()):
            return
        local = x.to_local() if isinstance(x, DTensor) else x
        if not bool(torch.isfinite(local).all()):
            self._first, self._order = place, self._looks
