"""Clusters: files, curves, and which link a group of ranks uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from seqcomp.diagnostics import PlanError
from seqcomp.hardware.cluster import Curve, Link, Rate, Span
from seqcomp.hardware.load import HERE, known_clusters, load_cluster
from seqcomp.plan.frozenmap import FrozenMap
from tests.fixtures.pricing import ideal


@pytest.mark.parametrize("name", known_clusters())
def test_known_clusters(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.gpus == cluster.gpus_per_node * cluster.max_nodes
    assert 1e9 < cluster.device.memory < 2e11
    for curve in (cluster.device.kernels.attention_forward, cluster.device.kernels.dense):
        assert all(0 < y <= 1 for _, y in curve.points)
    assert 2 * cluster.intra.bandwidth >= cluster.inter.bandwidth


def test_gpus_of_public_results_are_there() -> None:
    wanted = {"h100", "h200", "h800", "a100", "a800", "b200", "l20", "rtx-pro-6000", "cpu-gloo"}
    assert wanted <= set(known_clusters())


def test_all_parts_are_used() -> None:
    """Every file of a device or link belongs to a cluster."""
    used: set[str] = set()
    for path in (HERE / "clusters").glob("*.yaml"):
        data = yaml.safe_load(path.read_text())
        used |= {data[key] for key in ("device", "intra", "inter") if isinstance(data[key], str)}
    parts = {path.stem for f in ("devices", "links") for path in (HERE / f).glob("*.yaml")}
    assert parts == used


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="did you mean h100") as caught:
        load_cluster("h10o")
    (found,) = caught.value.diagnostics
    assert (found.code, found.legal) == ("SC027", known_clusters())
    with pytest.raises(PlanError, match="SC027"):
        load_cluster("x" * 5000)
    bad = tmp_path / "bad.yaml"
    text = (HERE / "clusters/cpu-gloo.yaml").read_text()
    for change, part in (
        (("gpus_per_node: 8", "gpus_per_node: none"), "gpus_per_node"),
        (("max_nodes: 1", "max_modes: 1"), "max_modes"),
        (('gb_s: {value: 1, source: "placeholder"}', "gb_s: 1"), "gb_s"),
        (("device:\n", "device: h10\nother:\n"), "no device called"),
        (("name: processes", "name: ["), "SC028"),
        (("gpus_per_node: 8", "gpus_per_node: 8\ngpus_per_node: 9"), "given twice"),
        (("gpus_per_node: 8", f"gpus_per_node: {'[' * 20_000}"), "levels"),
        (("max_nodes: 1", f"max_nodes: 1{'0' * 29}"), "max_nodes"),
        (('gb_s: {value: 1, source: "placeholder"}', "gb_s: {value: 0, source: x}"), "gb_s.value"),
        (("streaming: {value: 0.7", "streaming: {value: 0"), "streaming.value"),
        (("bf16: {value: 0.1", "bf16: {value: .nan"), "bf16.value"),
        (("launch_us: {value: ", "launch_us: {value: inf, source: x}\n    x: {value: "), "finite"),
    ):
        bad.write_text(text.replace(*change))
        with pytest.raises(PlanError, match=part) as caught:
            load_cluster(bad)
        assert {item.code for item in caught.value.diagnostics} == {"SC028"}
    bad.write_text(text)
    assert load_cluster(bad) == load_cluster("cpu-gloo")


def test_curves() -> None:
    curve = Curve(((1.0, 0.2), (4.0, 0.4), (16.0, 0.8)))
    assert [curve.at(x) for x in (0.5, 1, 2, 4, 8, 100)] == pytest.approx(
        [0.2, 0.2, 0.3, 0.4, 0.6, 0.8]
    )


def test_measured_rates() -> None:
    rates = FrozenMap({"all_gather": (Rate(2, 1e-6, 100.0), Rate(8, 3e-6, 300.0))})
    link = Link("link", 5e-6, 50.0, rates)
    assert link.measured("all_to_all", 4) is None
    found = link.measured("all_gather", 4)
    assert found is not None
    assert (found.latency, found.bandwidth) == pytest.approx((2e-6, 200.0))


MESHES = st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=1, max_size=3)


@settings(deadline=None, max_examples=60)
@given(MESHES, st.sampled_from([4, 6, 8]), st.data())
def test_spans_against_counting(sizes: list[int], node: int, data: st.DataObject) -> None:
    """No group is spread over more nodes than is said; where all divide, over as many."""
    axes = {f"a{i}": n for i, n in enumerate(sizes)}
    names = data.draw(st.sets(st.sampled_from(sorted(axes)), min_size=1))
    found = ideal(gpus_per_node=node).span(axes, names)
    groups: dict[tuple[int, ...], list[int]] = {}
    world = 1
    for n in sizes:
        world *= n
    for rank in range(world):
        rest, place = rank, {}
        for name, n in reversed(axes.items()):
            rest, place[name] = divmod(rest, n)
        key = tuple(place[name] for name in axes if name not in names)
        groups.setdefault(key, []).append(rank // node)
    nodes = [len(set(group)) for group in groups.values()]
    assert found.size == len(next(iter(groups.values())))
    assert found.nodes >= max(nodes)
    if all(node % n == 0 or n % node == 0 for n in sizes) and node != 6:
        assert found.nodes == max(nodes)


def test_links() -> None:
    cluster = ideal(gpus_per_node=8)
    axes = {"data": 4, "ring": 2, "tensor": 8}
    for names, span, link in (
        (["tensor"], Span(8, 8), cluster.intra),
        (["ring"], Span(2, 1), cluster.inter),
        (["data", "ring"], Span(8, 1), cluster.inter),
        (["ring", "tensor"], Span(16, 8), cluster.inter),
    ):
        assert cluster.span(axes, names) == span
        assert cluster.link_for(span) is link
