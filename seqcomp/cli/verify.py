"""``seqcomp verify PLAN --model M --seq-len S``: does the plan compute what one device computes?"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import typer

from seqcomp.cli.dtypes import VerifiedDtype, torch_name
from seqcomp.cli.options import DebugOption, JsonOption, LengthOption
from seqcomp.cli.refusal import refusal
from seqcomp.diagnostics import PlanError

EQUAL, DIFFERENT = 0, 1
_USAGE = {"SC020", "SC021", "SC026", "SC309", "SC921"}


class Backend(StrEnum):
    """What carries the ranks."""

    lockstep = "lockstep"
    gloo = "gloo"


class Mode(StrEnum):
    """Of the module; gradients are compared in both."""

    eval = "eval"
    train = "train"


def verify(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A file, or a preset such as usp_2x2.")
    ],
    *,
    model: Annotated[
        str,
        typer.Option(
            help="What to run, with new weights: hf:<Architecture>[?key=value&...], "
            "hf:path/config.json, titan:<model>/<flavor> or python:<module>:<factory>. Small "
            "sizes prove as much as large ones."
        ),
    ],
    seq_len: LengthOption,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Global batch; by default two per data rank."),
    ] = None,
    backend: Annotated[
        Backend, typer.Option(help="Ranks as threads of this process, or as gloo processes.")
    ] = Backend.lockstep,
    dtype: Annotated[
        VerifiedDtype, typer.Option(help="Of weights and floating inputs; fp64 proves most.")
    ] = VerifiedDtype.fp64,
    mode: Annotated[Mode, typer.Option(help="Mode of the module.")] = Mode.eval,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that ranks may take.")] = 600.0,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run a plan beside one device: loss, outputs and every gradient on every rank.

    Exit 0 equal, 1 different or refused, 2 wrong usage. Where they differ, the first operation
    that does is named with its module and values. Needs no GPU.
    """
    from seqcomp.integrations.sample import SampleInputs, SampleModel, require_memory
    from seqcomp.plan.load import load_plan
    from seqcomp.plan.resolve import resolve
    from seqcomp.verify.run import verify as run

    try:
        loaded = load_plan(plan)
        ranks = math.prod(loaded.mesh.values())
        require_memory(model, torch_name(dtype), ranks + 1)
        data = math.prod(loaded.mesh[axis] for axis in resolve(loaded).batch_axes)
        with _progress(shown=sys.stderr.isatty()) as progress:
            report = run(
                SampleModel(model, torch_name(dtype), mode.value),
                plan,
                inputs_fn=SampleInputs(model, batch or 2 * data, seq_len, torch_name(dtype)),
                backend=backend.value,
                timeout=timeout,
                progress=progress,
            )
    except PlanError as error:
        head = {"plan": plan, "ok": False}
        raise refusal(error, head, as_json=as_json, debug=debug, usage=_USAGE) from None
    except (RuntimeError, TimeoutError) as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"{plan}: {error}", err=True)
        raise typer.Exit(DIFFERENT) from None
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else str(report))
    raise typer.Exit(EQUAL if report.ok else DIFFERENT)


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    if not shown:
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("starting", total=None)

        def advance(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield advance
