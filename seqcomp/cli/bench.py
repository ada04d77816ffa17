"""``seqcomp bench --save profile.yaml``: what can this machine do?"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from seqcomp.cli.dtypes import Speed
from seqcomp.cli.options import DebugOption, JsonOption
from seqcomp.cli.refusal import writable, write

FAILED = 1


def bench(
    *,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a cluster file that --cluster takes."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes: as many as will be used, so that what they share is shared. One for "
            "each GPU, or 2; under torchrun those of the job.",
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of a process.")] = 1,
    dtype: Annotated[
        Speed | None, typer.Option(help="Of attention: bf16 on GPUs, fp32 on CPUs by default.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: rough figures within seconds.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure collectives and kernels: gloo between processes, NCCL between GPUs.

    Takes one or two minutes on an idle machine. Exit 0 measured, 1 failed, 2 wrong
    usage.
    """
    writable(save)
    import torch
    import yaml

    from seqcomp.profiling import run
    from seqcomp.profiling.sizes import QUICK

    main = dtype.value if dtype else "bf16" if torch.cuda.is_available() else "fp32"
    dtypes = tuple(dict.fromkeys((main, "fp32", "bf16")))
    sizes = QUICK if quick else run.default_sizes()
    try:
        with _progress() as tell:
            if run.under_torchrun():
                found = run.profile_here(sizes, dtypes, tell, threads=threads)
            else:
                count = ranks or run.default_ranks()
                found = run.profile_on(count, sizes, dtypes, tell, threads=threads)
        if found is None:
            return
    except (OSError, RuntimeError, TimeoutError) as error:
        if debug:
            traceback.print_exc()
        typer.echo(str(error), err=True)
        raise typer.Exit(FAILED) from None
    if save is not None:
        write(save, yaml.safe_dump(found, sort_keys=False, width=100))
    if as_json:
        where = None if save is None else str(save)
        typer.echo(json.dumps({"saved": where, "cluster": found}, indent=2))
        return
    from seqcomp.report.profile import profile_text

    typer.echo(profile_text(found))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield lambda stage: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda stage: status.update(f"measuring {stage}")
