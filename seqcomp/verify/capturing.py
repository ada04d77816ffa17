"""Is the captured graph the module? Compared module by module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seqcomp.capture.facts import makes_cache
from seqcomp.verify.diverging import distance, first_values
from seqcomp.verify.observe import Observation
from seqcomp.verify.report import Divergence
from seqcomp.verify.same_dropout import same_dropout, seed_of_verification
from seqcomp.verify.trace import Whole


def capture_divergence(
    whole: Whole,
    single: Observation,
    model_fn: Callable[[], nn.Module],
    inputs: Mapping[str, Any],
    tolerance: float,
) -> Divergence | None:
    """The first module whose result is nowhere in the global graph; None where outputs agree."""
    differs = {
        name: gap
        for name, want in single.outputs.items()
        if isinstance(want, Tensor)
        and not (gap := distance(want, whole.outputs.get(name, torch.empty(0)))) <= tolerance
    }
    if not differs:
        return _gradient_divergence(whole, single, tolerance)
    made: dict[str, list[str]] = {}
    for operation in whole.operations:
        if not operation.is_given:
            parts = operation.module.split(".") if operation.module else []
            for depth in range(len(parts) + 1):
                made.setdefault(".".join(parts[:depth]), []).append(operation.name)
    for path, result in module_results(model_fn(), inputs):
        names = [n for n in made.get(path, ()) if n in whole.trace.values]
        near = {n: distance(result, whole.trace.values[n]) for n in names}
        if names and not any(gap <= tolerance for gap in near.values()):
            closest = min(near, key=lambda n: near[n])
            operation = next(o for o in whole.operations if o.name == closest)
            return _divergence(
                path, closest, operation.op, near[closest], result, whole.trace.values[closest]
            )
    name, gap = next(iter(differs.items()))
    return _divergence("", name, "output", gap, single.outputs[name], whole.outputs[name])


def _gradient_divergence(whole: Whole, single: Observation, tolerance: float) -> Divergence | None:
    """The last parameter (the nearest to the loss) whose gradient the global graph has wrong."""
    floor = (
        1e-4
        * tolerance
        * max(
            (float(g.double().norm()) for g in single.gradients.values() if g is not None),
            default=0.0,
        )
    )
    placeholders = {name: node for node, name in whole.parameters.items()}
    for name, want in reversed(list(single.gradients.items())):
        node = placeholders.get(name)
        if want is None or node is None:
            continue
        got = whole.trace.gradients.get(node, torch.zeros_like(want))
        gap = distance(want, got, floor)
        if not gap <= tolerance:
            module, _, tensor = name.rpartition(".")
            return _divergence(module, node, f"gradient of {tensor}", gap, want, got)
    return None


def module_results(model: nn.Module, inputs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """(path, first floating tensor that its forward returned), in order of completion."""
    found: list[tuple[str, Tensor]] = []

    def record(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            for leaf in pytree.tree_leaves(out):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    found.append((path, leaf.detach()))
                    return

        return hook

    for path, module in model.named_modules():
        module.register_forward_hook(record(path))
    if makes_cache(model):
        inputs = {"use_cache": False, **inputs}
    with torch.no_grad(), same_dropout(seed_of_verification()):
        model(**inputs)
    return found


def _divergence(
    module: str, node: str, op: str, relative: float, want: Tensor, got: Tensor
) -> Divergence:
    index, expected, found = first_values(want, got)
    return Divergence("capture", module, node, op, 0, relative, index, expected, found)
