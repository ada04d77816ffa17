"""``seqcomp validate PLAN``: is a plan legal, and if not, what would be?"""

from __future__ import annotations

import json
import math
import sys
import traceback
from typing import Annotated, Any

import typer

from seqcomp.cli.options import whole
from seqcomp.cli.reading import reading
from seqcomp.diagnostics import Diagnostic
from seqcomp.integrations.validate import Validation, run_validation
from seqcomp.plan.axes import degree
from seqcomp.plan.legality import length_factor
from seqcomp.plan.schema import Plan

LEGAL, REFUSED, WRONG_USAGE = 0, 1, 2


def validate(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A file, or a preset such as usp_4x8.")
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="Also check heads, widths and masks of this model: a known one such as "
            "llama3-8b, hf:<Architecture>[?key=value&...], hf:path/config.json, "
            "titan:<model>/<flavor> or python:<module>:<factory>."
        ),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(
            parser=whole, metavar="N", help="Also check against this number of processes."
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            parser=whole, metavar="TOKENS", help="Also check this full length of sequences."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object to standard output.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of what the model raised.")
    ] = False,
) -> None:
    """Check a plan: exit 0 legal (warnings allowed), 1 refused or unreadable, 2 wrong usage.

    Needs no processes and no GPU, and without --model no torch.
    """
    with reading(model):
        result = run_validation(plan, model, world_size=world, seq_len=seq_len)
    refused = not result.ok
    if as_json:
        typer.echo(json.dumps(_as_json(plan, result), indent=2))
    else:
        for item in result.diagnostics:
            typer.echo(str(item), err=True)
        if not refused:
            assert result.plan is not None, "a plan without errors has been built"
            typer.echo("\n".join(_summary(plan, result.plan, result.diagnostics)))
    if debug and result.cause is not None:
        traceback.print_exception(result.cause, file=sys.stderr)
    raise typer.Exit(_exit_code(result))


def _exit_code(result: Validation) -> int:
    if result.ok:
        return LEGAL
    return WRONG_USAGE if any(item.code == "SC020" for item in result.diagnostics) else REFUSED


def _as_json(source: str, result: Validation) -> dict[str, Any]:
    return {
        "source": source,
        "legal": result.ok,
        "plan": None if result.plan is None else result.plan.to_dict(),
        "diagnostics": [item.to_json() for item in result.diagnostics],
    }


def _summary(source: str, plan: Plan, found: list[Diagnostic]) -> list[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    warnings = sum(item.severity == "warning" for item in found)
    counted = f" ({warnings} warning{'s' if warnings > 1 else ''})" if warnings else ""
    return [
        f"{source}: legal{counted}",
        f"  ranks    {math.prod(plan.mesh.values())} = {mesh}",
        f"  lengths  {_lengths(plan)}",
    ]


def _lengths(plan: Plan) -> str:
    layout = plan.strategies.ring.layout if plan.strategies.ring else "contiguous"
    ring = degree(plan, "ring")
    inner = degree(plan, "ulysses") * degree(plan, "megatron_sp")
    factor = length_factor(layout, ring, inner)
    zigzag = length_factor("zigzag", ring, inner)
    text = "any" if factor == 1 else f"multiples of {factor}"
    if layout == "auto" and zigzag != factor:
        text += f" (of {zigzag} for balanced causal work)"
    if plan.padding == "pad" and factor > 1:
        text = f"any, padded to {text}"
    return text
