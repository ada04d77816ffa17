"""`seqcomp.explain` says offline what compiled modules do on ranks."""

from __future__ import annotations

import json
import math
import resource
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import seqcomp
from seqcomp.diagnostics import PlanError
from seqcomp.report.build import Report
from seqcomp.strategies.base import AttentionShape, attention_flops
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.again import loss_of, with_memory
from tests.fixtures.documents import build_kind, packed
from tests.fixtures.lockstep import reported
from tests.fixtures.models import M0, Spec, build, inputs
from tests.fixtures.work import work_of

ALONE: plans.Plan = {"mesh": {"ring": 1}, "strategies": {"ring": {}}}
PLANS = [
    plans.usp(2, 2, "zigzag"),
    plans.with_data(plans.ring(2, "zigzag"), 2),
    with_memory(plans.ring(2, "zigzag"), checkpoint="block"),
    with_memory(plans.ulysses(2), loss_chunks=2),
    plans.megatron(2),
    with_memory(plans.with_tensor(plans.ring(2), 2), checkpoint="block", loss_chunks=2),
]
ONE = Spec(layers=1, causal=(True,))


def held(report: Report) -> dict[str, int]:
    return {row.what: row.bytes for row in report.footprint}


def names(plan: plans.Plan) -> str:
    memory = [str(v) for v in plan.get("memory", {}).values()]
    return "-".join([plans.name(plan), *memory])


def size(x: Tensor) -> int:
    return x.numel() * x.element_size()


# --- beside compiled modules -----------------------------------------------------------------


def trained(model: nn.Module, context: Any, local: dict[str, Tensor]) -> tuple[Report, Any]:
    """The report, and bytes counted: parameters, gradients, AdamW's state, what autograd saves."""
    loss_of(model, local)
    saved = work_of(model, M0.vocab, lambda: loss_of(model, local)).saved_bytes
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    report = seqcomp.of(model).report()
    return report, [*(sum(map(size, group)) for group in (parameters, gradients, states)), saved]


@pytest.mark.parametrize("plan", PLANS, ids=names)
def test_it_says_what_the_compiled_module_does(plan: plans.Plan) -> None:
    data = plan["mesh"].get("data", 1)
    found = seqcomp.explain(build(ONE), plan, seq_len=32, batch=2 // data)
    given = inputs(ONE, batch=2, seq=32)
    report, counted = lockstep(lambda: build(ONE), plan, trained, inputs=given)[0]
    assert found.comm
    assert found.comm == report.comm
    assert found.work == report.work
    assert found.footprint == report.footprint
    assert found.memory == report.memory
    assert (found.batch, found.length) == (2 // data, 32)
    said = held(found)
    assert [said[k] for k in ("parameters", "gradients", "optimizer state")] == counted[:3]
    assert said["saved activations"] == pytest.approx(counted[3], rel=0.02)
    if plan.get("memory", {}).get("checkpoint"):
        (row, *_) = report.memory
        assert said["recomputed block"] > 4 * row.bytes_kept / row.count


def test_tensor_ranks_hold_parts() -> None:
    """Positive control for the bytes of parameters: they are not those of the whole model."""
    whole = sum(map(size, build(M0).parameters()))
    assert held(seqcomp.explain(build(M0), "ring_2", seq_len=16))["parameters"] == whole
    cut = held(seqcomp.explain(build(M0), "megatron_sp_2", seq_len=16))["parameters"]
    assert whole / 2 < cut < 0.6 * whole


def test_fsdp_is_lowered_as_sharded() -> None:
    """What FSDP2 sends and holds, by hand: blocks alone, what else there is with the root."""
    spec, ways = Spec(vocab=97, bias=True, head_bias=True), 4
    plan = plans.with_fsdp(plans.usp(2, 2, "zigzag"), mixed_precision="bf16")
    model = build(spec, dtype=torch.float32)
    found = seqcomp.explain(model, plan, seq_len=16)
    shards = {name: -(-p.shape[0] // ways) * p[0].numel() for name, p in model.named_parameters()}
    sent = reported(found)
    low = 2
    for unit in ("layers.0", "layers.1", ""):
        own = sum(
            n
            for name, n in shards.items()
            if (name.startswith(f"{unit}.") if unit else not name.startswith("layers."))
        )
        label = f"fsdp {unit}".strip()
        gathered = sent[label, "all_gather", "ring+ulysses", "forward"]
        assert gathered == (1, (ways - 1) * own * low)
        again = sent.get((label, "all_gather", "ring+ulysses", "backward"))
        assert again == (gathered if unit else None)
        scattered = sent[label, "reduce_scatter", "ring+ulysses", "backward"]
        assert scattered == (1, (ways - 1) * own * 4)
    assert not any(row.module == "gradients" for row in found.comm)
    total = sum(shards.values()) * 4
    assert held(found)["parameters"] == held(found)["gradients"] == total
    assert held(found)["optimizer state"] == 2 * total + 4 * len(shards)
    everything = sum(p.numel() for p in model.parameters())
    assert held(found)["gathered parameters"] == everything * low  # two blocks and the root


def test_models_on_meta_save_no_scores() -> None:
    """Where no axis divides attention, torch's own imitation would write S x S scores down."""
    found = [seqcomp.explain(m, ALONE, seq_len=64) for m in (build(ONE), build(ONE).to("meta"))]
    assert held(found[0]) == held(found[1])


# --- attention -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "ring", "ulysses"),
    [("contiguous", 8, 1), ("contiguous", 2, 2), ("zigzag", 4, 2), ("striped", 8, 1)],
)
def test_causal_balance(layout: str, ring: int, ulysses: int) -> None:
    s = 64
    expected = {
        "contiguous": (2 * s - Fraction(s, ring) + 1) / (s + 1),
        "zigzag": Fraction(1),
        "striped": Fraction(s + ring, s + 1),
    }
    plan = plans.usp(ring, ulysses, layout) if ulysses > 1 else plans.ring(ring, layout)
    (row,) = seqcomp.explain(build(ONE), plan, seq_len=s, batch=3).work
    assert row.module == "layers.0.attn"
    assert row.balance == float(expected[layout])
    assert len(row.flops) == ring
    shape = AttentionShape(3, s, ONE.heads, ONE.kv_heads, ONE.head_dim)
    assert sum(row.flops) * ulysses == attention_flops(shape, causal=True, phase="forward")


def test_windows_and_full_attention() -> None:
    full = seqcomp.explain(
        build(Spec(causal=(False, True))), plans.ring(4, "contiguous"), seq_len=64
    )
    assert [row.mask for row in full.work] == ["full", "causal"]
    assert full.work[0].balance == 1.0
    assert sum(full.work[0].flops) == 4 * 64**2 * ONE.heads * ONE.head_dim
    window = (
        "hf:MistralForCausalLM?num_hidden_layers=1&hidden_size=32&intermediate_size=32&"
        "num_attention_heads=4&num_key_value_heads=2&vocab_size=64&sliding_window=8"
    )
    (row,) = seqcomp.explain(window, plans.ring(4, "contiguous"), seq_len=64).work
    pairs = sum(min(i + 1, 8) for i in range(64))
    assert row.mask == "window"
    assert sum(row.flops) == 4 * pairs * 32
    assert row.balance == float(Fraction(4 * 16 * 8, pairs))


# --- sizes -----------------------------------------------------------------------------------


def test_logits_and_outputs() -> None:
    found = held(seqcomp.explain(build(ONE), plans.ring(4), seq_len=64, dtype="fp32"))
    assert found["logits"] == 64 // 4 * 97 * 4
    assert found["output logits"] == 64 * 97 * 4
    chunks = with_memory(plans.ring(4), loss_chunks=2)
    found = held(seqcomp.explain(build(ONE), chunks, seq_len=64, dtype=torch.float32))
    assert found["logits"] == 64 // 4 // 2 * 97 * 4
    assert "output logits" not in found


def test_dtype_is_that_of_weights_and_activations() -> None:
    narrow, wide = (
        seqcomp.explain(build(ONE), plans.ulysses(2), seq_len=64, dtype=d) for d in ("bf16", None)
    )
    assert held(wide)["parameters"] == 4 * held(narrow)["parameters"]
    assert [row.dtype for row in narrow.kernels] == ["bfloat16"]
    own = [sum(r.bytes_sent for r in x.comm if r.kind == "all_to_all") for x in (narrow, wide)]
    assert own[1] == 4 * own[0] > 0


@pytest.mark.parametrize("kind", ["segments", "bool"])
def test_packed_documents_are_balanced_as_causal(kind: str) -> None:
    """Nobody knows their mask before the call: a balanced layout is not said to bring nothing."""
    report = seqcomp.explain(
        build_kind(kind), "ring_2_zigzag", seq_len=16, batch=2, example_inputs=packed(kind)
    )
    assert "SC208" not in [finding.code for finding in report.findings]
    bidirectional = seqcomp.explain(build(Spec(causal=(False, False))), "ring_2_zigzag", seq_len=16)
    assert "SC208" in [finding.code for finding in bidirectional.findings]


def test_experts_run_by_a_kernel_that_insists_on_strides() -> None:
    """Their weights have no values, and 1.5 GiB that nobody may allocate."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = seqcomp.explain(
        "hf:MixtralForCausalLM?num_hidden_layers=1&hidden_size=4096&intermediate_size=16384&"
        "num_attention_heads=4&num_key_value_heads=2&vocab_size=128&num_local_experts=4",
        "ring_2", seq_len=16, dtype="bf16",
    )  # fmt: skip
    assert "SC409" in [finding.code for finding in report.findings]
    assert held(report)["parameters"] > 4 * 3 * 4096 * 16384 * 2
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < held(report)["parameters"] / 2


def test_without_gradients_there_is_no_backward() -> None:
    with torch.no_grad():
        found = seqcomp.explain(build(ONE), plans.ring(2), seq_len=16)
    assert {row.phase for row in found.comm} == {"forward"}
    assert not {"gradients", "optimizer state", "saved activations"} & set(held(found))


def test_any_world_size_and_no_processes() -> None:
    plan = plans.with_data(plans.usp(64, 4, "zigzag"), 8)
    found = seqcomp.explain(build(ONE), plan, seq_len=1024)
    assert math.prod(found.mesh.values()) == 2048
    assert len(found.work[0].flops) == 64
    assert not dist.is_initialized()


def test_the_module_stays_as_it_is() -> None:
    model = build(Spec(tied=True, positions="table"))
    state = {
        name: (id(x), x.dtype, x.clone()) for name, x in model.state_dict(keep_vars=True).items()
    }
    seqcomp.explain(
        model, plans.with_fsdp(plans.ring(2), mixed_precision="bf16"), seq_len=16, dtype="bf16"
    )
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(state)
    for name, (identity, dtype, value) in state.items():
        assert (id(after[name]), after[name].dtype) == (identity, dtype)
        assert torch.equal(after[name], value)
    assert not any("forward" in vars(part) for part in model.modules())
    assert model.head.weight is model.emb.weight


# --- text, JSON, mistakes --------------------------------------------------------------------


def test_text_and_json() -> None:
    found = seqcomp.explain(build(ONE), plans.usp(2, 2, "zigzag"), seq_len=16)
    data = json.loads(json.dumps(found.to_json()))
    assert data["work"][0]["max_over_mean"] == 1.0
    assert {row["what"]: row["formula"] for row in data["footprint"]} == {
        "parameters": False, "gradients": True, "optimizer state": True, "buffers": False,
        "saved activations": False, "logits": False, "output logits": False,
    }  # fmt: skip
    text = str(found)
    assert "ring 2 x ulysses 2; batch 1, length 16" in text
    assert "FLOPs of visible pairs only" in text
    for row in found.footprint:
        assert f"│ {row.what} " in text
    assert "AdamW: two moments" in text


class Images(nn.Module):
    def forward(self, pixel_values: Tensor) -> Tensor:
        return pixel_values


class Broken(nn.Module):
    def forward(self, input_ids: Tensor) -> Tensor:
        raise KeyError("lost")


@pytest.mark.parametrize(
    ("model", "plan", "given", "codes"),
    [
        (build(), "ring_2", {"seq_len": 15}, ["SC206"]),
        (build(), "ulysses_3", {"seq_len": 12}, ["SC201"]),
        (build(), "ring_2", {"seq_len": 0, "batch": 0}, ["SC010", "SC010"]),
        (build(), "ring_2", {"seq_len": 16, "dtype": "int3"}, ["SC010"]),
        ("nowhere", "ring_2_zig", {"seq_len": 16}, ["SC012", "SC020"]),
        (3, "ring_2", {"seq_len": 16}, ["SC022"]),
        (Images(), "ring_2", {"seq_len": 16}, ["SC309"]),
        (Broken(), "ring_2", {"seq_len": 16}, ["SC301"]),
    ],
)
def test_mistakes(model: Any, plan: str, given: dict[str, Any], codes: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        seqcomp.explain(model, plan, **given)
    assert [item.code for item in caught.value.diagnostics] == codes


def test_a_compiled_module_is_refused() -> None:
    def explained(model: nn.Module, context: Any, local: dict[str, Any]) -> str:
        with pytest.raises(PlanError) as caught:
            seqcomp.explain(model, "ring_2", seq_len=16)
        return caught.value.diagnostics[0].code

    assert lockstep(build, "ring_2", explained) == ["SC022", "SC022"]


def test_packed_documents() -> None:
    """Work is that of pairs within documents, on ranks of a layout that is not for causal masks."""
    documents = (128, *(16,) * 8)
    report = seqcomp.explain(build(ONE), "ring_4", seq_len=256, documents=documents)
    place = [i + 1 for n in documents for i in range(n)]
    pairs = [sum(place[rank * 64 : (rank + 1) * 64]) for rank in range(4)]
    ((row,), (grid,)) = report.work, report.tiles
    assert [n * sum(pairs) for n in row.flops] == [n * sum(row.flops) for n in pairs]
    assert [sum(areas) for areas in grid.areas] == pairs
    assert row.mask == grid.mask == "documents"
    assert row.balance == pytest.approx(max(pairs) * 4 / sum(pairs))
    assert report.to_json()["documents"] == "128,16x8"
    assert "in documents of 128,16x8" in str(report)
    assert "in documents of 128,16x8" in report.to_html()
    whole = seqcomp.explain(build(ONE), "ring_4_contiguous", seq_len=256)
    sent, before = (
        sum(r.bytes_sent for r in found.comm if r.kind == "p2p") for found in (report, whole)
    )
    assert 0 < sent < before
    with pytest.raises(PlanError, match="documents have 240 tokens"):
        seqcomp.explain(build(ONE), "ring_4", seq_len=256, documents=documents[:-1])
