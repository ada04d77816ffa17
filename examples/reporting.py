"""What `train_text.py` shows: progress, tables, the picture of the losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure
from measuring import Run, Sent
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

MIB = 2**20


@contextmanager
def progress(
    run: Run, steps: int, beside: Run | None, *, quiet: bool
) -> Iterator[Callable[[], None]]:
    """A bar; the function that it yields is called after each step.

    It prints the step's loss, next to the one of `beside`.
    """
    if quiet:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(highlight=False)) as bar:
        task = bar.add_task(run.name, total=steps)
        bar.console.print(f"\n{run.name}")

        def shown() -> None:
            bar.advance(task)
            bar.console.print(_losses(run, beside))

        yield shown


def _losses(run: Run, beside: Run | None) -> str:
    step, loss = len(run.losses), run.losses[-1]
    if beside is None:
        return f"step {step:4}   loss {loss:.6f}"
    other = beside.losses[step - 1]
    return (
        f"step {step:4}   loss {beside.name} {other:.6f}   {run.name} {loss:.6f}"
        f"   difference {abs(loss - other):.1e}"
    )


def summary(beside: Run | None, runs: list[Run], tokens: int, errors: list[float]) -> None:
    """A table with a row for each process; `tokens` are those of one step, of all ranks."""
    console = Console(highlight=False)
    console.print("\nmeasured:")
    table = Table(box=SIMPLE, padding=0, pad_edge=False)
    table.add_column("", no_wrap=True)
    for head in (
        "compile s", "step s", "tokens/s", "peak MiB", "saved MiB", "last loss",
    ):  # fmt: skip
        table.add_column(head, justify="right", no_wrap=True)
    named = [("one process", beside)] if beside else []
    for name, run in [*named, *((f"rank {i}", run) for i, run in enumerate(runs))]:
        later = median(run.seconds[1:] or run.seconds)
        table.add_row(
            name,
            f"{run.compile_s:.1f}" if run.compile_s else "",
            f"{later:.2f}",
            f"{tokens / later:,.0f}",
            f"{run.peak_bytes / MIB:,.0f}",
            f"{run.saved_bytes / MIB:.1f}",
            f"{run.losses[-1]:.6f}",
        )
    console.print(table)
    console.print(
        "step:     median over all steps but the first\n"
        "tokens/s: of the whole batch; one CPU thread, or one GPU, in each process\n"
        "peak:     resident memory, with Python and torch (on a GPU: allocated on it)\n"
        "saved:    activations kept for backward, each storage once, no parameters"
    )
    if beside:
        worst = max(abs(a - b) for a, b in zip(beside.losses, runs[0].losses, strict=True))
        console.print(f"\nlargest difference of the losses, all steps: {worst:.1e}")
    for error in errors:
        console.print(
            f"largest max|dg| / max|g| in the first step, all parameters and ranks: {error:.1e}"
        )


def sent(rows: list[Sent]) -> None:
    """A table of the bytes that rank 0 sent in one step, against the formulas."""
    console = Console(highlight=False)
    console.print("\nbytes that rank 0 sent in one step:" if rows else "\nnothing was sent")
    if not rows:
        return
    table = Table(box=SIMPLE)
    for head in ("for", "by", "counted", "formula"):
        table.add_column(head, justify="right" if head in ("counted", "formula") else "left")
    for row in rows:
        formula = "" if row.formula is None else f"{row.formula:,}"
        table.add_row(row.purpose, row.how, f"{row.counted:,}", formula)
    console.print(table)


def curves(path: Path, run: Run, beside: Run | None) -> None:
    """Both losses over the steps, as a picture."""
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    steps = range(1, len(run.losses) + 1)
    if beside:
        axes.plot(steps, beside.losses, linewidth=6, alpha=0.35, label=beside.name)
    axes.plot(steps, run.losses, color="black", linewidth=1.2, label=run.name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    Console(highlight=False).print(f"\nwrote {path}")
