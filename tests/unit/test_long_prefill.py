"""The example runs without torch, and what it prints follows from the cost model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seqcomp.cost.estimate import Estimate, estimate
from seqcomp.cost.named import load_shape
from seqcomp.cost.run import Run
from seqcomp.hardware.load import load_cluster
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve

ROOT = Path(__file__).parents[2]
PRICE = 3.0
WITHOUT_TORCH = (
    "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
    "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
)


def run(*arguments: str) -> str:
    argv = [sys.executable, "-c", WITHOUT_TORCH, str(ROOT / "examples" / "long_prefill.py")]
    done = subprocess.run(
        [*argv, *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def priced(tokens: int, ring: int, tensor: int) -> Estimate:
    plan = resolve(
        load_plan(
            {
                "mesh": {"ring": ring, "tensor": tensor},
                "strategies": {"ring": {"layout": "zigzag"}, "megatron_sp": {}},
            }
        )
    )
    cluster, run = load_cluster("a100"), Run(tokens, mode="prefill")
    return estimate(plan, load_shape("llama3-8b"), cluster, run, gpu_hour_price=PRICE)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(run("--json", "--price", str(PRICE)))


def test_figures_are_those_of_the_model(found: dict[str, Any]) -> None:
    assert [p["plan"] for p in found["plans"]] == ["1 GPU", "TP8", "TP8 x SP4", "TP8 x SP8"]
    for plan, (ring, tensor) in zip(found["plans"], ((1, 1), (1, 8), (4, 8), (8, 8)), strict=True):
        expected = priced(plan["tokens"], ring, tensor)
        assert 999_000 < plan["tokens"] <= 1_000_000
        assert plan["gpus"] == ring * tensor
        assert plan["seconds"] == expected.step_seconds
        assert plan["price"] == pytest.approx(expected.gpu_hours * PRICE)
        assert plan["price"] == pytest.approx(plan["seconds"] * plan["gpus"] / 3600 * PRICE)
        assert plan["fits"] == expected.fits == (tensor > 1)
        bytes_kept = 131_072 * plan["tokens"] / plan["gpus"]
        assert plan["cache_gb"] == pytest.approx(bytes_kept / 1e9)


def test_conclusions_follow_from_the_figures(found: dict[str, Any]) -> None:
    _, node, _, widest = found["plans"]
    text = "\n".join(found["reasons"])
    assert f"{node['seconds'] / widest['seconds']:.2f} x faster than TP8" in text
    assert f"{widest['price'] / found['retrieved']['price']:,.0f} x as much" in text
    # The longer, the more of a ring's ideal; the ring is never cheaper.
    for ring in ("4", "8"):
        gains = [length["speed_up"][ring] for length in found["lengths"]]
        assert gains == sorted(gains)
        assert gains[-1] <= int(ring)
        assert all(length["dearer"][ring] >= 0 for length in found["lengths"])
        first = next(x for x in found["lengths"] if x["speed_up"][ring] >= 0.75 * int(ring))
        assert f"from {first['tokens']:,} tokens on" in text
    longest = next(r for r in found["reasons"] if r.startswith("Up to "))
    tokens = int(longest.split()[2].replace(",", ""))
    assert priced(tokens, 1, 8).step_seconds <= 10 < priced(tokens + 1024, 1, 8).step_seconds


def test_the_tables_are_printed() -> None:
    printed = run("--tokens", "131072")
    assert "131,072 tokens" in printed
    assert "TP8 x SP8" in printed
    assert "One GPU: no" not in printed, "it fits"
