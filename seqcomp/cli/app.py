"""Builds the typer application from its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from seqcomp.cli.bench import bench
from seqcomp.cli.estimate import estimate
from seqcomp.cli.explain import explain
from seqcomp.cli.graph import graph
from seqcomp.cli.search import search
from seqcomp.cli.validate import validate
from seqcomp.cli.verify import verify


def build_app() -> typer.Typer:
    """The application; a new one each time, so that nothing is shared."""
    app = typer.Typer(
        help="Compile PyTorch models for sequence parallelism, as a plan says.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    app.command()(validate)
    app.command()(verify)
    app.command()(explain)
    app.command()(bench)
    app.command()(estimate)
    app.command()(graph)
    app.command()(search)
    return app


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if version:
        from seqcomp import __version__

        typer.echo(f"seqcomp {__version__}")
        raise typer.Exit
