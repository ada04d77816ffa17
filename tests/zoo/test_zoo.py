"""Every architecture is exact or refused by a code under every plan, as the support table says.

Each row runs here under one plan in turn; `python -m tests.zoo.table --run` decides all
cells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from seqcomp.diagnostics import CODES
from tests.fixtures.families import needs_torchtitan
from tests.zoo import table
from tests.zoo.cells import BOTH, EXACT, GATHERED, PLANS, WHOLE, ZOO, Cell, decide, decide_all

EXPECTED = table.load()
_ORDER = list(PLANS)
SAMPLE: list[Cell] = [(name, _ORDER[i % len(_ORDER)]) for i, name in enumerate(ZOO)]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Mapping[Cell, str]:
    """What the cells that are asked for are, decided by two processes side by side."""
    wanted = [
        item.callspec.params["cell"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.function is test_cells_are_what_the_table_says
        and item.get_closest_marker("skipif") is None
    ]
    return dict(decide_all(wanted))


def _param(cell: Cell) -> object:
    marks = [needs_torchtitan] if "torchtitan" in cell[0] else []
    return pytest.param(cell, id=" - ".join(cell), marks=marks)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cell", [_param(cell) for cell in SAMPLE])
def test_cells_are_what_the_table_says(outcomes: Mapping[Cell, str], cell: Cell) -> None:
    name, plan = cell
    found = outcomes[cell] if cell in outcomes else decide(cell)
    assert found == EXPECTED[name][plan]


def test_the_table_is_complete_and_has_no_faults() -> None:
    assert list(EXPECTED) == list(ZOO)
    for name, row in EXPECTED.items():
        assert list(row) == list(PLANS), name
        for plan, outcome in row.items():
            codes = outcome.split()
            refused = all(code in CODES and CODES[code].severity == "error" for code in codes)
            assert outcome in (EXACT, GATHERED, WHOLE, BOTH) or refused, (name, plan, outcome)


def test_the_page_of_what_is_supported_has_the_table() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    assert table.in_page(text) == table.markdown(EXPECTED)


def test_every_strategy_has_many_exact_architectures() -> None:
    for plan in PLANS:
        plain = [name for name, row in EXPECTED.items() if row[plan] == EXACT]
        assert len(plain) >= 40, plan


def test_names_say_what_is_special() -> None:
    assert len(ZOO) >= 60
    assert all(re.fullmatch(r"[\w .,:'/()-]+", name) for name in ZOO)
