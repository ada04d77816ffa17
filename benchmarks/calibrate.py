"""Fits the few constants of each machine to what was published of it.

    python benchmarks/calibrate.py [--machine a100] [--fit]

Without --fit: every row with what the cluster file's constants predict. With it: the constants that
least squares finds, to be written into the files under seqcomp/hardware. One set a machine.
"""

from __future__ import annotations

import argparse
import sys

from published import constants
from published.machines import Machine, machines
from published.rows import typical
from rich.console import Console
from rich.table import Table

from seqcomp.hardware.cluster import Cluster


def table(machine: Machine, cluster: Cluster) -> Table:
    """Row, published, predicted, error."""
    shown = Table("source", "row", "published", "predicted", "", "error", title=machine.name)
    for row in (*machine.rows, *machine.others):
        error = "" if row.left_out else f"{100 * row.error(cluster):+.1f} %"
        name = row.name + (f" (left out: {row.left_out})" if row.left_out else "")
        cells = (f"{row.published:,.2f}", f"{row.predict(cluster):,.2f}", row.unit)
        shown.add_row(row.source, name, *cells, error)
    errors = [r.error(cluster) for r in (*machine.rows, *machine.others) if not r.left_out]
    worst = max(map(abs, errors))
    shown.caption = f"median {100 * typical(errors):.1f} %, worst {100 * worst:.1f} %"
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", help="one of them alone")
    parser.add_argument("--fit", action="store_true", help="look for the constants again")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
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


if __name__ == "__main__":
    main()
