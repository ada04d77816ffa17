"""A call as a plan sees it: bound to the module's signature, with the role of every dim."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from seqcomp.capture.call import Call, InputDims, bind_call, classify_inputs
from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.lowering.variants import CallSizes, sizes_of
from seqcomp.plan.resolve import ResolvedPlan

Bound = tuple[Call, tuple[InputDims | None, ...], CallSizes]


def bound_call(
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    resolved: ResolvedPlan,
    *,
    where: str,
    stateless: bool,
) -> Bound:
    """The call of a module with this forward, the dims of its leaves, and its sizes.

    Raises PlanError: SC501, SC305 (as `bind_call`), SC503 (as `sizes_of`), SC111 for an input of
    the plan that the forward does not take.
    """
    call = bind_call(signature, args, kwargs, where=where, stateless=stateless)
    dims = classify_inputs(call, resolved.input_spec)
    for name in resolved.plan.inputs:
        if name not in call.names and name not in signature.parameters:
            raise PlanError(
                [
                    diagnostic(
                        "SC111",
                        where=f"inputs.{name}",
                        found=name,
                        legal=tuple(signature.parameters),
                        help="name an argument of the model's forward",
                    )
                ]
            )
    return call, dims, sizes_of(call, dims)
