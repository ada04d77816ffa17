"""One run on two gloo ranks, through the command: what it writes is a cluster that prices plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from seqcomp.cli.app import build_app
from seqcomp.cost.estimate import estimate
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.hardware.load import load_cluster
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve
from seqcomp.profiling.links import KINDS
from seqcomp.profiling.sizes import QUICK


@pytest.mark.distributed
def test_bench_writes_a_cluster_that_estimate_takes(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    argv = ["bench", "--ranks", "2", "--quick", "--save", str(path), "--json"]
    result = CliRunner().invoke(build_app(), argv)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["saved"] == str(path)

    cluster = load_cluster(path)
    assert (cluster.gpus_per_node, cluster.max_nodes) == (2, 1)
    assert set(cluster.intra.rates) == set(KINDS)
    for kind, rates in cluster.intra.rates.items():
        assert [rate.ranks for rate in rates] == [2], kind
        assert rates[0].bandwidth > 1e6, kind
    kernels = cluster.device.kernels
    assert [x for x, _ in kernels.dense.points] == list(QUICK.rows)
    for curve in (kernels.attention_forward, kernels.attention_backward):
        assert [x for x, _ in curve.points] == list(QUICK.tiles)
    shares = [
        share
        for curve in (kernels.dense, kernels.attention_forward, kernels.attention_backward)
        for _, share in curve.points
    ]
    assert max(shares) == 1, "the peak is the fastest that was measured"
    assert set(cluster.device.peak) == {"fp32", "bf16"}
    assert 1e8 < cluster.device.peak["fp32"] < 1e14

    model = ModelShape.decoder(
        layers=2, hidden=64, heads=4, kv_heads=2, vocab=128, mlp_width=128, name="small"
    )
    plan = resolve(load_plan("ring_2"), model.facts, seq_len=256)
    found = estimate(plan, model, cluster, Run(256, dtype="fp32"))
    assert 0 < found.step_seconds < 60
    assert found.fits


def test_where_nothing_can_be_written_nothing_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "here.yaml"
    result = CliRunner().invoke(build_app(), ["bench", "--save", str(path)])
    assert result.exit_code == 2
    assert str(path) in result.stderr
