"""Regions of the forward that run again in backward, and what they keep from their first run.

A region is one call of a block under ``torch.utils.checkpoint``: of the values inside it only its
inputs are saved, and the backward runs its code again. Everything that a region knows is held by
an object of the rank and reached through the operations that were bound to that rank, so that the
second run finds it whatever context or thread the backward runs in.

What a region keeps (``keeps``) is what is dear to make again, for what it costs to hold:

* attention: its output and log-sum-exp, O(s * width) bytes against O(s * s * width) work and,
  in a ring, all hops of K and V. Kernels that divided attentions call, and those of torch.
* an exchange whose result is no larger than this rank's share of an activation (all-to-all,
  reduce-scatter, all-reduce): one share of bytes against about as many sent, and the wait.
* not an all-gather: its result is P shares. It is made again, once for the second run and the
  weight gradients together (see ``Regathered``), so that no more is sent than without a region.
* not matrix products, norms and other work on single tokens: they send nothing, and a byte of
  their results stands for h FLOPs or fewer, where h is the hidden width, beside s in attention.
  An MLP that runs in chunks of tokens would be made a third time for what reads its result in the
  second run, where anything does: that one result is kept (see runtime/chunked_mlp.py).

A second run gives kept results back in the order in which they were made. Values that autograd
saves are matched by torch in the order of saving; a kept result has no node that saves anything
but what the first run saved.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from seqcomp.runtime.offload import Offload
from seqcomp.runtime.opaque_calls import keeps
from seqcomp.runtime.traffic import Traffic

aten = torch.ops.aten

KERNELS = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Attention of torch in one kernel: what undivided attentions run."""

Values = tuple[Any, ...]


class Keep(Protocol):
    """Gives the results of its argument, or those of the first run."""

    def __call__(self, make: Callable[[], Sequence[Any]], /) -> Values: ...


def keep_nothing(make: Callable[[], Sequence[Any]], /) -> Values:
    """`make()`: outside of every region."""
    return tuple(make())


class Again(Protocol):
    """A promise of the first run that the second one can fulfil ahead of time."""

    def expect(self) -> None: ...


P = TypeVar("P", bound=Again)


class _Region:
    """What the first run of a block left for the second; lives as long as the autograd graph."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self.again = False
        self.busy = False  # inside something that is kept as a whole
        self._kept: list[Values] = []
        self._promises: list[Any] = []
        self._next = {"kept": 0, "promises": 0}

    @property
    def open(self) -> bool:
        return self.keeps and not self.busy

    def start(self, again: bool) -> None:
        self.again = again
        self._next = {"kept": 0, "promises": 0}

    def store(self, values: Values) -> None:
        self._kept.append(tuple(map(_detached, values)))

    def recall(self) -> Values:
        # New aliases: what an operation returns gets a place in the graph of this run.
        return tuple(map(_detached, self._at(self._kept, "kept")))

    def promise(self, make: Callable[[], P]) -> P:
        if self.again:
            promise: P = self._at(self._promises, "promises")
            promise.expect()
            return promise
        self._promises.append(make())
        made: P = self._promises[-1]
        return made

    def _at(self, items: list[Any], name: str) -> Any:
        index = self._next[name]
        self._next[name] += 1
        assert index < len(items), f"the second run has more {name} than the first"
        return items[index]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Checkpoint:
    """How a block is run. ``keeps``: what is dear is kept (the module's docstring says what).

    ``kernels``: the block calls attention of torch; ``calls``: and functions of the rank beside it.
    ``early_stop``: the second run ends with the last value that the backward needs; only where all
    ranks save the same values, as what is sent after it would be sent by some of them.
    ``offload``: the block's inputs wait on the host.
    """

    keeps: bool = False
    kernels: bool = False
    calls: bool = False
    early_stop: bool = True
    offload: bool = False


class Recompute:
    """The regions of one rank: which one is running, and whether again."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._region: _Region | None = None
        self._offload = Offload()

    @property
    def is_again(self) -> bool:
        """Whether a second run is going on of a region that keeps what is dear."""
        return self._region is not None and self._region.open and self._region.again

    def keep(self, make: Callable[[], Sequence[Any]], /) -> Values:
        """`make()`, or in a second run what it gave in the first. Without gradients."""
        region = self._region
        if region is None or not region.open:
            return tuple(make())
        if region.again:
            return region.recall()
        region.busy = True
        try:
            made = tuple(make())
        finally:
            region.busy = False
        region.store(made)
        return made

    def exchange(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`run`, a differentiable exchange that saves nothing, with a result that is kept."""

        def exchanged(x: Tensor, *rest: Any) -> Tensor:
            region = self._region
            if region is None or not region.open:
                return run(x, *rest)
            if region.again:
                return _Recalled.apply(x, *region.recall())
            made = run(x, *rest)
            region.store((made,))
            return made

        return exchanged

    def promise(self, make: Callable[[], P]) -> P:
        """`make()`, or in a second run what the first made, told to expect its value."""
        return make() if self._region is None else self._region.promise(make)

    def checkpointed(
        self, forward: Callable[..., Any], how: Checkpoint, weights: int
    ) -> Callable[..., Any]:
        """`forward(module, *values)` as a region. The last `weights` values are parameters."""

        def run(module: Any, *values: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(module, *values)
            if torch.compiler.is_dynamo_compiling() and not how.offload:
                return traced(module, *values)
            return recorded(module, *values)

        least = _keep_kernels if how.kernels and how.calls else _keep_none

        def traced(module: Any, *values: Any) -> Any:
            return checkpoint(
                lambda: forward(module, *values),
                use_reentrant=False,
                context_fn=_keep_dear if how.keeps else least,
            )

        @torch.compiler.disable
        def recorded(module: Any, *values: Any) -> Any:
            count = len(values) - weights
            code = functools.partial(_run, forward, module, values[count:])
            saved = self._offload.of(values[:count]) if how.offload else contextlib.nullcontext()
            with saved:
                return checkpoint(
                    code,
                    *values[:count],
                    use_reentrant=False,
                    # No code of ours draws from torch's generators.
                    preserve_rng_state=False,
                    early_stop=how.early_stop,
                    context_fn=functools.partial(self._runs, how),
                )

        return run

    def _runs(self, how: Checkpoint) -> tuple[Any, Any]:
        """The contexts of both runs of a new region."""
        region = _Region(how.keeps)
        return self._run(region, how, again=False), self._run(region, how, again=True)

    def _run(self, region: _Region, how: Checkpoint, *, again: bool) -> Any:
        return _Reentered(lambda: self._inside(region, how, again))

    @contextlib.contextmanager
    def _inside(self, region: _Region, how: Checkpoint, again: bool) -> Iterator[None]:
        outer, self._region = self._region, region
        counted, self._traffic.again = self._traffic.again, again or self._traffic.again
        region.start(again)
        try:
            with _Kernels(self.keep) if how.keeps and how.kernels else contextlib.nullcontext():
                yield
        finally:
            self._region, self._traffic.again = outer, counted


def _keep_none() -> tuple[Any, Any]:
    """For who traces: nothing is kept."""
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)


def _keep_kernels() -> tuple[Any, Any]:
    """For who traces: what torch holds to draw random numbers, as its attention may, is kept.

    It would save a random state for a second run, behind the functions that the graph calls, and
    then take a function for a tensor (2.13).
    """

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in KERNELS else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _keep_dear() -> tuple[Any, Any]:
    """For who traces: the same results are kept as without a compiler."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        dear = op in KERNELS or keeps(op, args)
        return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _run(
    forward: Callable[..., Any], module: Any, weights: tuple[Tensor, ...], *values: Any
) -> Any:
    return forward(module, *values, *weights)


class _Reentered:
    """A context that can be entered many times: a retained graph runs its regions again."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._open: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._open.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)


class _Kernels(TorchDispatchMode):
    """Keeps the results of torch's own attention."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self._keep = keep

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in KERNELS:
            return func(*args, **(kwargs or {}))
        return self._keep(lambda: func(*args, **(kwargs or {})))


class _Recalled(torch.autograd.Function):
    """A kept result in the place of the exchange that made it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise AssertionError("the graph of a second run is never differentiated")
