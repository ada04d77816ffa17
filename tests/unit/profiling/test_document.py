from pathlib import Path

import pytest
import yaml

from seqcomp.hardware.load import load_cluster
from seqcomp.profiling.document import cluster_document
from seqcomp.profiling.measured import MeasuredKernels, MeasuredRate
from seqcomp.report.profile import profile_text

KERNELS = MeasuredKernels(
    dense={"fp32": ((16, 1e10), (64, 4e10)), "bf16": ((16, 2e10), (64, 6e10))},
    attention_forward=((128, 2e10), (256, 5e10)),
    attention_backward=((128, 1e10), (256, 3e10)),
    copy=8e9,
    stream=6e9,
    launch=2e-6,
    contention=0.5,
    memory=4 << 30,
)
INSIDE = [
    MeasuredRate("p2p", 2, 1e-4, 2e9),
    MeasuredRate("all_gather", 2, 2e-4, 1e9),
    MeasuredRate("all_gather", 4, 4e-4, 1.5e9),
]
ACROSS = [MeasuredRate("p2p", 2, 3e-4, 5e8)]


def document(inside: list[MeasuredRate], across: list[MeasuredRate]) -> dict[str, object]:
    return cluster_document(
        KERNELS,
        inside,
        across,
        name="here",
        device="a core",
        transport="gloo",
        ranks_per_node=4,
        nodes=2 if across else 1,
    )


def test_a_document_is_read_as_it_was_measured(tmp_path: Path) -> None:
    found = document(INSIDE, ACROSS)
    path = tmp_path / "here.yaml"
    path.write_text(yaml.safe_dump(found))
    cluster = load_cluster(path)
    assert (cluster.gpus_per_node, cluster.max_nodes) == (4, 2)
    device, kernels = cluster.device, cluster.device.kernels
    assert device.memory == 4 << 30
    assert device.peak["fp32"] == pytest.approx(5e10), "the fastest kernel is attention"
    assert device.peak["fp32"] * kernels.dense.at(64) == pytest.approx(4e10)
    assert device.peak["bf16"] * kernels.dense.at(64) == pytest.approx(6e10)
    assert device.peak["fp32"] * kernels.attention_backward.at(256) == pytest.approx(3e10)
    assert device.bandwidth * kernels.streaming == pytest.approx(6e9)
    assert (kernels.launch, kernels.contention) == pytest.approx((2e-6, 0.5))
    rate = cluster.intra.measured("all_gather", 4)
    assert rate is not None
    assert (rate.latency, rate.bandwidth) == pytest.approx((4e-4, 1.5e9))
    assert (cluster.intra.latency, cluster.intra.bandwidth) == pytest.approx((1e-4, 2e9))
    assert cluster.inter.bandwidth == pytest.approx(5e8)
    text = profile_text(found)
    for shown in ("40 GFLOP/s", "all_gather", "400 us", "between nodes", "50% of its time"):
        assert shown in text


def test_one_rank_has_kernels_alone(tmp_path: Path) -> None:
    path = tmp_path / "alone.yaml"
    path.write_text(yaml.safe_dump(document([], [])))
    assert not load_cluster(path).intra.rates
    assert "not measured" in path.read_text()
