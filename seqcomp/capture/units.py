"""Modules that run as one unit: their own Python code on the tokens of a rank, never traced.

Routing of tokens to experts has sizes that depend on values, which no capture can hold. Where a
module treats each token alone none of that matters outside of it: in the graph it is one operation
from tensors and parameters to tensors, and each rank calls the original module on its own tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from seqcomp.capture.forwards import standing_in
from seqcomp.capture.inside import Kept, kept_inside
from seqcomp.capture.mixtures import counters_of, is_experts, is_mixture
from seqcomp.capture.probes import Probe, Probed, Size, output_sizes
from seqcomp.capture.structure import Structure
from seqcomp.diagnostics import PlanError, diagnostic

_NAME = "seqcomp::token_local"
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


# Not torch.library.custom_op, which hides the operation in an autograd.Function while it is traced.
torch.library.define(
    _NAME,
    "(Tensor[] inputs, Tensor[] parameters, int unit, SymInt[] sizes, str kinds) -> Tensor[]",
)


@torch.library.register_fake(_NAME)
def _imagined(
    inputs: list[Tensor], parameters: list[Tensor], unit: int, sizes: list[int], kinds: str
) -> list[Tensor]:
    results, rest = [], list(sizes)
    for kind in kinds.split():
        dtype, ndim = kind.split(":")
        shape, rest = rest[: int(ndim)], rest[int(ndim) :]
        results.append(inputs[0].new_empty(shape, dtype=getattr(torch, dtype)))
    return results


@dataclass(frozen=True, eq=False)
class Unit:
    """A module call that is one operation of the graph: (inputs, parameters) -> tensors.

    `path` is the module's; `names` are its parameters in the order of the second operand;
    `outputs` are the sizes of each result; `dtype` is the coarsest that it computes in; `marked`
    says whether the plan named it. `counters` are the buffers to which it adds what it counts of
    its tokens in the captured mode, with their bytes. `kept` is what it keeps for the backward,
    None where that is not known.
    """

    path: str
    kind: str
    names: tuple[str, ...]
    arguments: Structure  # (args, kwargs) of the call
    results: Probed
    outputs: tuple[tuple[Size, ...], ...]
    marked: bool
    counters: tuple[tuple[str, int], ...] = ()
    kept: Kept | None = None
    __name__ = "token_local"

    @property
    def dtype(self) -> torch.dtype | None:
        """The coarsest floating dtype that it computes in."""
        return self.results.dtype

    def __call__(self, *args: Any) -> Any:
        raise AssertionError(f"{self.path} is not bound to a module")

    def run(
        self, root: nn.Module, inputs: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> list[Tensor]:
        """Calls the module at `path` below `root`. Raises RuntimeError where it returns another
        structure than at the capture."""
        module = root.get_submodule(self.path)
        args, kwargs = self.arguments.filled(inputs)
        with _reparametrize_module(module, dict(zip(self.names, parameters, strict=True))):
            out = module.forward(*args, **kwargs)
        structure, tensors = Structure.of(out)
        expected = self.results.structure
        if (structure.spec, structure.places) != (expected.spec, expected.places):
            raise RuntimeError(f"{self.path} returns another structure than when it was captured")
        # What follows was captured on contiguous values.
        return [x.contiguous() for x in tensors]


@dataclass
class Units:
    """The units of one capture, by the number that the graph knows them by."""

    found: list[Unit] = field(default_factory=list)
    probes: dict[Unit, Probe] = field(default_factory=dict)

    def count_kept(self) -> None:
        """Finds what each unit keeps; not while something is traced, as it runs as in a call."""
        for index, unit in enumerate(self.found):
            probe = self.probes.pop(unit)
            self.found[index] = counted = replace(unit, kept=kept_inside(probe))
            self.probes[counted] = probe


@contextlib.contextmanager
def opaque_units(root: nn.Module, is_marked: Callable[[str], bool]) -> Iterator[Units]:
    """While a capture runs, marked and known modules are one operation each.

    Raises PlanError SC313 from inside the traced forward where a module's outputs cannot be told.
    """
    units = Units()
    with contextlib.ExitStack() as stack:
        for path, module, marked in _units_of(root, is_marked):
            recorder = _recorder(path, module, units, marked=marked)
            stack.enter_context(standing_in(module, recorder))
        yield units


def _units_of(
    root: nn.Module, is_marked: Callable[[str], bool]
) -> Iterator[tuple[str, nn.Module, bool]]:
    """The outermost modules that run as units, and whether the plan marks them."""
    outer: tuple[str, ...] = ()
    for path, module in root.named_modules():
        if not path or any(path.startswith(f"{above}.") for above in outer):
            continue
        marked = is_marked(path)
        if marked or is_experts(module) or is_mixture(path, module):
            outer = (*outer, path)
            yield path, module, marked


def _recorder(path: str, module: nn.Module, units: Units, *, marked: bool) -> Callable[..., Any]:
    original = module.forward
    parameters: Mapping[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments, inputs = Structure.of((args, kwargs))
        for leaf in arguments.others:
            if not isinstance(leaf, _CONSTANTS):
                raise _untold(path, f"an argument of type {type(leaf).__name__}")
        if not inputs:
            raise _untold(path, "a call without tensors")

        def call(tensors: Sequence[Tensor]) -> Any:
            own_args, own_kwargs = arguments.filled(tensors)
            return original(*own_args, **own_kwargs)

        probe = Probe(path, module, parameters, call, inputs, counters_of(module))
        results, outputs = output_sizes(probe, inputs)
        unit = Unit(
            path=path,
            kind=type(module).__name__,
            names=tuple(parameters),
            arguments=arguments,
            results=results,
            outputs=outputs,
            marked=marked,
            counters=results.counted,
        )
        units.found.append(unit)
        units.probes[unit] = probe
        shapes = [x.shape for x in inputs]
        sizes = [size.of(shapes) for sizes in outputs for size in sizes]
        kinds = " ".join(
            f"{str(dtype).removeprefix('torch.')}:{len(sizes)}"
            for dtype, sizes in zip(results.dtypes, outputs, strict=True)
        )
        held = dict(module.named_parameters(remove_duplicate=False))
        tensors = torch.ops.seqcomp.token_local(
            inputs, [held[name] for name in parameters], len(units.found) - 1, sizes, kinds
        )
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *held.values()))
        for x in tensors:  # what is refused for its hidden gradient is refused behind a unit too
            if wanted and x.dtype.is_floating_point:
                x.requires_grad_()
        return results.structure.filled(tensors)

    return forward


def _untold(path: str, found: str) -> PlanError:
    return PlanError(
        [
            diagnostic(
                "SC313",
                where=path,
                found=found,
                legal="tensors, and plain constants that are the same in every call",
                help="mark a module around it, whose arguments are tensors",
            )
        ]
    )
