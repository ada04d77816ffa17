"""Regions of a lowered graph: no cycles, every exchange between two of them, equal blocks once."""

from __future__ import annotations

import networkx as nx
import pytest

from seqcomp.diagnostics import PlanError
from seqcomp.integrations.explain import Lowered, lowered, regions_in
from seqcomp.lowering import ops
from seqcomp.lowering.regions import Repeat, _periods, block_of, region_graph
from tests.fixtures.models import Spec, build

PLAN = "usp_2x2+megatron_sp_2"
SPEC = Spec(layers=3, causal=(True,) * 3, heads=8, kv_heads=4)


@pytest.fixture(scope="module")
def what() -> Lowered:
    return lowered(build(SPEC), PLAN, lambda found: found, seq_len=32)


def test_no_cycles_and_everything_is_somewhere(what: Lowered) -> None:
    program = what.program
    found = region_graph(program.flat, program.capture.inputs)
    assert nx.is_directed_acyclic_graph(found)
    members = [m for _, data in found.nodes(data=True) for m in data["members"] if data["ops"]]
    assert len(members) == len(set(members))
    exchanges = {
        n.name
        for n in program.flat.nodes
        if isinstance(n.target, ops.Gather | ops.ReduceScatter | ops.AllReduce | ops.Attention)
    }
    kinds = {m: data["kind"] for _, data in found.nodes(data=True) for m in data["members"]}
    assert exchanges
    # Outputs have a region of their own beside the one that makes them.
    assert all(kinds[name] in ("move", "output") for name in exchanges)
    for source, target, data in found.edges(data=True):
        assert data["values"]
        assert found.nodes[source]["level"] < found.nodes[target]["level"]
    outside = [d for _, d in found.nodes(data=True) if d["kind"] in ("input", "output")]
    assert [d["members"][0] for d in outside if d["kind"] == "input"] == ["input_ids", "labels"]
    assert sum(d["kind"] == "output" for d in outside) == 2


def test_equal_blocks_are_drawn_once(what: Lowered) -> None:
    program = what.program
    inputs = program.capture.inputs
    whole, folded = (region_graph(program.flat, inputs, fold=fold) for fold in (False, True))
    assert folded.graph["repeats"] == (Repeat(("layers.0", "layers.1", "layers.2")),)
    blocks = [data["block"] for _, data in folded.nodes(data=True)]
    assert set(blocks) == {"", "layers.0"}
    each = sum(data["block"] == "layers.2" for _, data in whole.nodes(data=True))
    assert each == blocks.count("layers.0") > 4
    assert len(whole) == len(folded) + 2 * each
    # What follows the last block follows the one that is drawn.
    norm = next(n for n, d in folded.nodes(data=True) if "norm" in d["modules"])
    before = {folded.nodes[n]["block"] for n in folded.predecessors(norm)}
    assert "layers.0" in before


@pytest.mark.parametrize(
    ("signatures", "found"),
    [
        ("aaaa", [(0, 1, 4)]),
        ("abbb", [(1, 1, 3)]),
        ("ababab", [(0, 2, 3)]),
        ("aaaaabaaaaab", [(0, 6, 2)]),
        ("abc", []),
        ("", []),
        ("aabb", [(0, 1, 2), (2, 1, 2)]),
    ],
)
def test_periods(signatures: str, found: list[tuple[int, int, int]]) -> None:
    assert _periods(signatures) == found


def test_blocks_by_path() -> None:
    assert block_of("model.layers.3.self_attn.q_proj") == "model.layers.3"
    assert block_of("encoder.block.0.layer.1") == "encoder.block.0"
    assert block_of("lm_head") == block_of("") == ""


def test_the_graph_of_one_module(what: Lowered) -> None:
    """One that is not drawn in the whole; of it, and of what it takes from and gives to."""
    found = regions_in(what, "layers.2")
    inside = {r.id for r in found.regions if r.block == "layers.2"}
    assert {r.label for r in found.regions if r.id in inside} >= {
        "attention", "all-gather over tensor", "reduce-scatter over tensor", "local work",
    }  # fmt: skip
    assert all(f.source in inside or f.target in inside for f in found.flows)
    assert {r.block for r in found.regions} == {"layers.1", "layers.2", ""}
    attention = next(r for r in found.regions if r.label == "attention")
    assert attention.modules == ("layers.2.attn",)
    assert 0 < attention.forward < attention.backward
    given = next(f for f in found.flows if f.target == attention.id)
    assert given.values[0] == "1 x 4 x 8 x 8 float64: dim 1 over tensor, dim 2 over ring+ulysses"
    assert given.bytes == (4 + 2 + 2) * 8 * 8 * 8
    with pytest.raises(PlanError, match=r"layers\.9") as caught:
        regions_in(what, "layers.9")
    assert [d.code for d in caught.value.diagnostics] == ["SC032"]
