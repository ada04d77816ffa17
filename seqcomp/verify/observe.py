"""One forward and backward, observed: on one device, and on a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from seqcomp.api import of
from seqcomp.capture.facts import makes_cache
from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.lowering.ops import Place
from seqcomp.lowering.parameters import Cut
from seqcomp.lowering.precision import computing_dtype, rounds_elsewhere
from seqcomp.verify.parts import Share
from seqcomp.verify.same_dropout import SEED, same_dropout, seed_of_verification

ModelFn = Callable[[], nn.Module]
Weights = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Observation:
    """Outputs by dotted path, the objective, and gradients by parameter name."""

    outputs: Mapping[str, Any]
    objective: float
    gradients: Mapping[str, Tensor | None]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the outputs that are tensors, in order."""
        return {n: tuple(x.shape) for n, x in self.outputs.items() if isinstance(x, Tensor)}


@dataclass(frozen=True)
class RankObservation:
    """What one rank saw, with what is needed to find its parts in the whole."""

    rank: int
    place: Place
    share: Share
    cuts: Mapping[str, Cut]
    seen: Observation
    findings: tuple[str, ...]
    precision: torch.dtype
    rounds_elsewhere: bool


def seeded(model_fn: ModelFn) -> nn.Module:
    """`model_fn()` with the same random numbers each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_fn()


def observe_one(
    model: nn.Module, inputs: Mapping[str, Any], is_dropped: Callable[[str], bool]
) -> Observation:
    """Forward and backward on one device; what the plan drops is left out of the objective.

    A cache that the model would make by its own default is not made, as in compiled calls, and
    dropout drops what it drops there.
    """
    if makes_cache(model):
        inputs = {"use_cache": False, **inputs}
    with same_dropout(seed_of_verification()):
        outputs = {n: x for n, x in named_outputs(model(**inputs)).items() if not is_dropped(n)}
        order = list(outputs)
        return _differentiated(
            model, outputs, lambda name, x: projection(tuple(x.shape), order.index(name))
        )


def observe_rank(
    model: nn.Module,
    inputs: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    data: tuple[int, int],
    rank: int,
) -> RankObservation:
    """Forward and backward of a compiled model. `shapes`: of the outputs of one device."""
    torch.manual_seed(SEED)
    outputs = {n: x for n, x in named_outputs(model(**inputs)).items() if n in shapes}
    compiled, order = of(model), list(shapes)
    program, _ = compiled.last_program()
    share = Share(*data, compiled.token_index().cpu())
    sharded = program.fsdp_units is not None
    seen = _differentiated(
        model,
        outputs,
        lambda name, x: share.of(projection(shapes[name], order.index(name)), tuple(x.shape)),
        # Contributions that the plan averages: what is compared are their sums.
        times=data[1] if compiled.resolved.gradients == "mean" else 1,
        whole_gradients=sharded,
    )
    return RankObservation(
        rank=rank,
        place=compiled.binding(program).place(),
        share=share,
        cuts={} if sharded else _by_every_name(model, program.cuts),
        seen=seen,
        findings=tuple(str(finding) for finding in program.findings),
        precision=computing_dtype(program.flat, program.capture.parameters),
        rounds_elsewhere=rounds_elsewhere(program.flat),
    )


def _by_every_name(model: nn.Module, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """`cuts` names a tied parameter once, by any of its names."""
    by_tensor = {id(model.get_parameter(name)): cut for name, cut in cuts.items()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: by_tensor[id(p)] for name, p in named if id(p) in by_tensor}


def named_outputs(out: Any) -> dict[str, Any]:
    """Leaves of a module's output by dotted path."""
    paths, _ = pytree.tree_flatten_with_path(out)
    return {
        ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
        or "output": leaf
        for path, leaf in paths
    }


def objective_of(outputs: Mapping[str, Any], weights: Weights) -> Tensor:
    """What is differentiated: the sum of the scalar outputs, else a projection of all outputs.

    `weights(name, x)` are the factors of one output. A projection is each rank's contribution,
    as a loss is that a user computes from outputs.

    Raises PlanError SC024 where no output has a gradient.
    """
    floating = _floating(outputs)
    if not floating:
        raise PlanError(
            diagnostic(
                "SC024",
                where="verify",
                found=", ".join(outputs) or "no output",
                legal="an output with a gradient",
                help="return the loss or the logits, with parameters that require gradients",
            )
        )
    terms = [x.double() for x in floating.values() if x.dim() == 0] or [
        (x.double() * weights(name, x).to(x.device)).sum() for name, x in floating.items()
    ]
    return torch.stack(terms).sum()


def _floating(outputs: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: x
        for name, x in outputs.items()
        if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad
    }


def projection(shape: tuple[int, ...], seed: int) -> Tensor:
    """Weights of unit variance for the whole of an output."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _differentiated(
    model: nn.Module,
    outputs: Mapping[str, Any],
    weights: Weights,
    *,
    times: int = 1,
    whole_gradients: bool = False,
) -> Observation:
    """times: factor of a projection's gradients. whole_gradients: gathered, on every rank."""
    model.zero_grad(set_to_none=True)
    objective = objective_of(outputs, weights)
    projected = all(x.dim() for x in _floating(outputs).values())
    (objective * times if projected else objective).backward()
    return Observation(
        outputs={
            name: x.detach().cpu() if isinstance(x, Tensor) else x for name, x in outputs.items()
        },
        objective=float(objective.detach()),
        gradients={
            name: _gradient(p, whole=whole_gradients) for name, p in model.named_parameters()
        },
    )


def _gradient(parameter: nn.Parameter, *, whole: bool) -> Tensor | None:
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor() if whole else gradient.to_local()
    return None if gradient is None else gradient.detach().cpu().clone()
