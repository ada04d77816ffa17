"""Fits the few constants of each machine to what was published of it.

    python benchmarks/calibrate.py [--machine a100] [--fit]

Without --fit: every row with what the cluster file's constants predict, and how many constants rows
have decided; of H100, which has two, what each says of the other. With it: the constants that least
squares finds, to be written into the files under seqcomp/hardware. One set a machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from published import constants
from published.left_out import left_out
from published.machines import Machine, machines
from published.rows import typical
from rich.console import Console
from rich.table import Table

from seqcomp.hardware.cluster import Cluster


def table(machine: Machine, cluster: Cluster) -> Table:
    """Row, published, predicted, error."""
    shown = Table("source", "row", "published", "predicted", "", "error", title=machine.name)
    for row in machine.every_row:
        cells = (f"{row.published:,.2f}", f"{row.predict(cluster):,.2f}", row.unit)
        shown.add_row(row.source, row.name, *cells, f"{100 * row.error(cluster):+.1f} %")
    shown.caption = "median {}, worst {}".format(*off(machine, cluster))
    return shown


def off(machine: Machine, cluster: Cluster) -> tuple[str, str]:
    """Median and worst error of all rows."""
    errors = [abs(row.error(cluster)) for row in machine.every_row]
    return f"{100 * typical(errors):.1f} %", f"{100 * max(errors):.1f} %"


def summary(clusters: Sequence[tuple[Machine, Cluster]]) -> Table:
    """How many constants explain how many rows, and how well."""
    shown = Table("machine", "rows", "constants", "of which", "median", "worst", show_lines=True)
    for machine, cluster in clusters:
        fitted = [f"{name}: fitted" for name in machine.start]
        apart = [f"{name}: from {row}" for name, row in machine.apart.items()]
        counts = (str(len(machine.every_row)), str(len(machine.owed)))
        which = "\n".join([*fitted, *apart]) or "none: nothing is fitted to these rows"
        shown.add_row(machine.name, *counts, which, *off(machine, cluster))
    return shown


def one_by_one(machine: Machine, cluster: Cluster) -> Table:
    """What one row decides, and how near the other is then."""
    title = f"{machine.name}: one row decides a constant, the other is predicted"
    shown = Table("constant", "value", "decided by", "predicted", "error", title=title)
    errors = []
    for item in left_out(cluster):
        errors.append(abs(item.error))
        value, error = f"{item.value:.3g}", f"{100 * item.error:+.1f} %"
        shown.add_row(item.constant, value, item.by, item.row, error)
    shown.caption = f"median {100 * typical(errors):.1f} %, worst {100 * max(errors):.1f} %"
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", help="one of them alone")
    parser.add_argument("--fit", action="store_true", help="look for the constants again")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    shown: list[tuple[Machine, Cluster]] = []
    for machine in machines():
        if args.machine not in (None, machine.name):
            continue
        cluster = machine.cluster
        if args.fit and machine.start:
            found = machine.fit()
            cluster = constants.with_constants(cluster, machine.constants, found)
            for name, value in found.items():
                console.print(f"{machine.name}: {name} = {value:.4g}", highlight=False)
        console.print(table(machine, cluster), highlight=False)
        if not machine.owed:
            console.print(one_by_one(machine, cluster), highlight=False)
        shown.append((machine, cluster))
    console.print(summary(shown), highlight=False)


if __name__ == "__main__":
    main()
