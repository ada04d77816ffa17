"""The support table as data (expected.json), and the table of docs/support.md made from it.

python -m tests.zoo.table                   the page's table from the data
python -m tests.zoo.table --run [PATTERN]   decides the cells of matching rows anew, first
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.zoo.cells import BOTH, EXACT, GATHERED, PLANS, WHOLE, ZOO, decide_all

DATA = Path(__file__).with_name("expected.json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"
BEGIN, END = "<!-- support table: python -m tests.zoo.table -->", "<!-- end of support table -->"
Table = Mapping[str, Mapping[str, str]]


def load() -> dict[str, dict[str, str]]:
    """{architecture: {plan: outcome}}"""
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}


def save(table: Table) -> None:
    ordered = {
        name: {plan: table[name][plan] for plan in PLANS if plan in table[name]}
        for name in ZOO
        if name in table
    }
    DATA.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def markdown(table: Table) -> str:
    """One row per kind and outcome: architectures that fare alike under all plans share one."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, entry in ZOO.items():
        outcomes = tuple(_shown(table[name][plan]) for plan in PLANS)
        groups.setdefault((entry.kind, outcomes), []).append(name)
    kinds = list(dict.fromkeys(entry.kind for entry in ZOO.values()))
    rows = sorted(groups.items(), key=lambda item: kinds.index(item[0][0]))
    lines = [
        "| | architectures | " + " | ".join(PLANS) + " |",
        "|" + "---|" * (len(PLANS) + 2),
        *(
            f"| {kind} | {'; '.join(names)} | {' | '.join(outcomes)} |"
            for (kind, outcomes), names in rows
        ),
    ]
    return "\n".join(lines)


def _shown(outcome: str) -> str:
    shown = {EXACT: "exact", GATHERED: "exact*", WHOLE: "whole", BOTH: "whole*"}
    return shown.get(outcome, outcome)


def in_page(text: str) -> str:
    """The table between its markers in the page's text."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs="?", const="", metavar="PATTERN")
    parser.add_argument("--missing", action="store_true", help="only cells without an entry")
    options = parser.parse_args()
    table = load()
    if options.run is not None:
        cells = [
            (name, plan)
            for plan in PLANS
            for name in ZOO
            if options.run.lower() in name.lower()
            and not (options.missing and plan in table.get(name, {}))
        ]
        for (name, plan), outcome in decide_all(cells):
            sys.stdout.write(f"{name} | {plan} | {outcome}\n")
            sys.stdout.flush()
            table.setdefault(name, {})[plan] = outcome
            save(table)
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{markdown(table)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
