"""Published timings against the cost model, with few constants for each machine.

The constants stand in the cluster files with their sources; `benchmarks/calibrate.py` fits them.
"""

from __future__ import annotations

import math
import sys
from itertools import pairwise

import pytest

from benchmarks.published import constants as c
from benchmarks.published.attention import (
    DEGREES,
    RFA,
    USP_A100,
    USP_A100_LONG,
    USP_L20,
    K,
    usp_rate,
)
from benchmarks.published.machines import Machine, machines
from benchmarks.published.rows import typical
from benchmarks.published.serving import (
    MILLION,
    PREFILL,
    PREFILL_SPEED,
    cache_gb,
    prefill,
    tensor_parallel,
)
from seqcomp.hardware.load import load_cluster

MACHINES = {machine.name: machine for machine in machines()}
TYPICAL, WORST = 0.15, 0.30
CLOSER = {"long prefill": 0.15, "attention over PCIe": 0.15}
"""Sources of which every row has to be this near."""

LEFT_OUT = {
    "baseline (tensor parallel), forward",
    "baseline (tensor parallel), backward",
    "sequence parallel, forward",
    "sequence parallel, backward",
    "full recomputation, forward",
    "full recomputation, backward",
    "selective, forward",
    "selective, backward",
}


@pytest.mark.parametrize("name", MACHINES)
def test_published_timings_are_met(name: str) -> None:
    machine = MACHINES[name]
    cluster = machine.cluster
    errors, lines = {}, []
    for row in (*machine.rows, *machine.others):
        error = row.error(cluster)
        note = f"left out: {row.left_out}" if row.left_out else f"{100 * error:+6.1f} %"
        lines.append(f"{row.source:22} {row.name:44} {row.published:9.2f} {row.unit:13} {note}")
        if not row.left_out:
            errors[row.source, row.name] = error
    sys.stdout.write("\n".join([*lines, ""]))
    if machine.start:
        assert typical(errors.values()) <= TYPICAL
    for (source, row_name), error in errors.items():
        assert abs(error) <= CLOSER.get(source, WORST), (source, row_name, error)


def test_what_is_left_out_is_named() -> None:
    rows = [row for m in MACHINES.values() for row in (*m.rows, *m.others)]
    assert {row.name for row in rows if row.left_out} == LEFT_OUT
    assert len(rows) - len(LEFT_OUT) == 24 + 8 + 16 + 6 + 3 + 4 + 1


@pytest.mark.parametrize("name", [m.name for m in MACHINES.values() if m.start])
def test_constants_are_where_least_squares_puts_them(name: str) -> None:
    """Few of them, none per row: moving any one by a tenth makes all rows together worse."""
    machine = MACHINES[name]
    assert len(machine.start) <= len(machine.fitted) / 1.3
    best = c.loss(machine.cluster, machine.fitted)
    for constant in machine.start:
        for factor in (0.9, 1.1):
            assert _moved(machine, constant, factor) > best, (constant, factor)


def _moved(machine: Machine, constant: str, factor: float) -> float:
    """Sum of squares with one constant changed, as it is in the cluster."""
    known, cluster = machine.constants[constant], machine.cluster
    return c.loss(known.set(cluster, known.get(cluster) * factor), machine.fitted)


@pytest.mark.parametrize(
    ("machine", "table"), [("l20", USP_L20), ("a100", USP_A100)], ids=("PCIe", "NVLink")
)
def test_the_best_degrees_of_usp_are_found(
    machine: str, table: dict[int, tuple[tuple[float, float], ...]]
) -> None:
    """PCIe: 2 x ring 4; NVLink: Ulysses alone. Also how much balancing the ring gains."""
    cluster = load_cluster(machine)
    off = []
    for length, rates in table.items():
        for index, layout in enumerate(("contiguous", "zigzag")):
            published = {u: both[index] for u, both in zip(DEGREES, rates, strict=True)}
            predicted = {u: usp_rate(cluster, length, u, layout) for u in DEGREES}
            assert max(predicted, key=predicted.__getitem__) == max(
                published, key=published.__getitem__
            ), (length, layout)
        for ulysses, (basic, balanced) in zip(DEGREES, rates, strict=True):
            off.append(_gain(machine, length, ulysses) / (balanced / basic) - 1)
    assert typical(off) <= 0.08
    # The worst is 2 x 4 at 8K on PCIe, 1.10 measured and 1.29 predicted, where latency is all.
    assert max(map(abs, off)) <= 0.20


def test_what_balancing_gains_comes_near_its_bound() -> None:
    """Of rows whose length is in doubt ratios are held: 91 to 95 % of (2r-1)/r."""
    for ulysses, (basic, balanced) in zip(DEGREES, USP_A100_LONG, strict=True):
        ring = 8 // ulysses
        gain = _gain("a100", 256 * K, ulysses)
        assert gain == pytest.approx(balanced / basic, rel=0.15)
        assert gain <= (2 * ring - 1) / ring + 1e-9
    gains = [_gain("a100", 256 * K, u) for u in DEGREES]
    assert all(less < more for less, more in pairwise(gains))


def _gain(machine: str, length: int, ulysses: int) -> float:
    rates = [usp_rate(load_cluster(machine), length, ulysses, y) for y in ("contiguous", "zigzag")]
    return rates[1] / rates[0]


@pytest.mark.parametrize("machine", RFA)
@pytest.mark.parametrize("mode", ["prefill", "train"])
def test_an_unbalanced_ring_of_eight_reaches_8_15ths(machine: str, mode: str) -> None:
    """A law without constants: 53.3 %, measured 51.4 to 53.9."""
    ideal, contiguous, *_ = RFA[machine][mode]
    assert contiguous / ideal == pytest.approx(8 / 15, abs=0.02)


def test_the_one_constant_of_the_long_prefill_is_fitted_too() -> None:
    cluster = load_cluster("a100")

    def loss(speed: float) -> float:
        times = {ring: prefill(cluster, ring, speed).step_seconds for ring in PREFILL}
        return sum(math.log(times[ring] / PREFILL[ring][0]) ** 2 for ring in PREFILL)

    assert loss(PREFILL_SPEED) < min(loss(0.97 * PREFILL_SPEED), loss(1.03 * PREFILL_SPEED))


def test_a_million_tokens_keep_their_keys_and_values_exactly() -> None:
    """131,072 bytes a token: 131.07 GB in all, of which each GPU has its part."""
    cluster = load_cluster("a100")
    for ring, (_, gigabytes) in PREFILL.items():
        assert cache_gb(prefill(cluster, ring)) == pytest.approx(gigabytes, abs=0.005)
        assert cache_gb(prefill(cluster, ring)) * 8 * ring == pytest.approx(
            131_072 * MILLION / 1e9, rel=1e-4
        )


def test_tensor_parallelism_over_pcie_gains_nothing() -> None:
    cluster = load_cluster("rtx-pro-6000-fp32")
    alone, over_eight = tensor_parallel(cluster, 1)[0], tensor_parallel(cluster, 8)[0]
    assert over_eight > 0.9 * alone
