"""What shapes say a rank sends and keeps is what the lowered graph says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

import seqcomp
from seqcomp.cost import decoder, memory
from seqcomp.cost.memory import made_again, memory_rows
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.cost.widths import padded, widths_of
from seqcomp.cost.workload import workload_of
from seqcomp.integrations.models import build_model
from seqcomp.integrations.shapes import _apart, _Sizes
from seqcomp.lowering import fsdp_units
from seqcomp.plan.load import load_plan
from seqcomp.runtime import chunked_mlp
from tests.fixtures.pricing import planned

S, LAYERS = 64, 2
LLAMA = (
    f"hf:LlamaForCausalLM?num_hidden_layers={LAYERS}&hidden_size=64&intermediate_size=96&"
    "num_attention_heads=8&num_key_value_heads=4&vocab_size=128"
)
SHAPE = ModelShape.decoder(layers=LAYERS, hidden=64, heads=8, kv_heads=4, vocab=128, mlp_width=96)
Sent = dict[tuple[str, str, str], tuple[int, int]]


def with_memory(plan: str, **memory: Any) -> dict[str, Any]:
    return {**load_plan(plan).to_dict(), "memory": memory}


MIXED = {
    "mesh": {"data": 2, "ring": 2},
    "strategies": {"data": {}, "ring": {}, "fsdp": {"mixed_precision": "bf16"}},
}

PLANS: list[tuple[Any, str]] = [
    ("data_2+usp_2x2", "bf16"),
    ("usp_2x2+megatron_sp_2", "bf16"),
    ("megatron_sp_8", "bf16"),
    (with_memory("ring_2_allgather+megatron_sp_2", checkpoint="block"), "fp32"),
    (with_memory("data_2+ulysses_2+megatron_sp_2+fsdp", checkpoint="selective"), "fp32"),
    (MIXED, "bf16"),
    (MIXED, "fp32"),
]


@pytest.mark.parametrize(("plan", "dtype"), PLANS, ids=str)
def test_as_explained(plan: Any, dtype: str) -> None:
    report = seqcomp.explain(LLAMA, plan, seq_len=S, batch=2, dtype=dtype)
    resolved, run = planned(plan, SHAPE, S), Run(S, 2, dtype)
    work = workload_of(resolved, SHAPE, run)
    (block,) = work.blocks
    for layer in range(LAYERS):
        rows = [r for r in report.comm if r.module == f"model.layers.{layer}.self_attn"]
        again = [s for s in block.again if s.axis != resolved.tensor_axis]
        assert sent(rows) == sent([*block.attention, *again])
    steps = [*block.all] * LAYERS + [step for _, step in work.ends]
    assert without_buckets(sent(report.comm)) == without_buckets(sent(steps))
    assert work.bytes_sent(SHAPE) == report.bytes_sent()
    for phase in ("forward", "backward"):
        assert work.bytes_sent(SHAPE, phase) == report.bytes_sent(phase)  # type: ignore[arg-type]
    said = {row.what: row.bytes for row in report.footprint}
    held = {row.what: row.bytes for row in memory_rows(resolved, SHAPE, run)}
    kept = held["saved activations"] + held["saved outside of blocks"]
    assert kept == pytest.approx(said["saved activations"], rel=0.05)
    for what in ("parameters", "gradients", "gathered parameters", "output logits"):
        assert held.get(what) == said.get(what)
    # Beside the moments torch counts steps, of each parameter.
    assert held["optimizer state"] == pytest.approx(said["optimizer state"], abs=4 * 21)


def test_logits_are_given_without_padding() -> None:
    """It is cut off behind the gather over the sequence, before the one over the vocabulary."""
    plan = {**load_plan("ring_2+megatron_sp_2").to_dict(), "padding": "pad"}
    report = seqcomp.explain(LLAMA, plan, seq_len=S - 3, batch=2, dtype="bf16")
    resolved, run = planned(plan, SHAPE, S - 3), Run(S - 3, 2)
    assert padded(resolved, SHAPE, run).seq_len == S
    work = workload_of(resolved, SHAPE, run)
    for phase in ("forward", "backward"):
        assert work.bytes_sent(SHAPE, phase) == report.bytes_sent(phase)  # type: ignore[arg-type]
    steps = [s for where, s in work.ends if where == "logits"]
    assert sent(steps) == sent(r for r in report.comm if r.module == "logits")
    said, held = (
        next(r.bytes for r in rows if r.what == "output logits")
        for rows in (report.footprint, memory_rows(resolved, SHAPE, run))
    )
    assert held == said


def sent(rows: Iterable[Any]) -> Sent:
    """(kind, axis, phase) -> number of collectives and bytes."""
    counts, sizes = Counter[Any](), Counter[Any]()
    for row in rows:
        key = (row.kind, row.axis, row.phase)
        counts[key] += row.count
        sizes[key] += row.bytes_sent
    return {key: (counts[key], sizes[key]) for key in counts}


def without_buckets(rows: Sent) -> Sent:
    """Sums of gradients go in buckets: their number depends on the order of parameters."""
    return {
        key: (0 if key[0] == "all_reduce" and key[2] == "backward" else count, size)
        for key, (count, size) in rows.items()
    }


def test_prefill_is_a_forward() -> None:
    plan = planned("usp_2x2+megatron_sp_2", SHAPE, S)
    train, prefill = (workload_of(plan, SHAPE, Run(S, mode=m)) for m in ("train", "prefill"))
    assert prefill.bytes_sent(SHAPE, "backward") == 0
    layers = [
        sum(s.bytes_sent for s in w.blocks[0].all if s.phase == "forward") for w in (train, prefill)
    ]
    assert layers[0] == layers[1] > 0
    assert not [where for where, _ in prefill.ends if where in ("logits", "loss")]


def test_windows_send_what_is_seen() -> None:
    """Keys beyond the window of all queries of a rank do not travel."""
    window = ModelShape.decoder(
        layers=1, hidden=64, heads=8, kv_heads=4, vocab=128, mlp_width=96, mask="window", window=4
    )
    plan = planned("ring_4_contiguous", window, S)
    (own,), (whole,) = (workload_of(plan, m, Run(S)).blocks for m in (window, SHAPE))
    forward = [sum(s.bytes_sent for s in b.attention if s.phase == "forward") for b in (own, whole)]
    assert forward[0] == 3 * 2 * 4 * 8 * 2  # three keys, of one neighbour
    backward = sum(s.bytes_sent for s in own.attention if s.phase == "backward")
    assert backward == 3 * 2 * 4 * 8 * (2 + 4), "keys again, and gradients of those it got, in fp32"
    assert forward[1] == 3 * 16 * 2 * 4 * 8 * 2


def test_chunks_are_those_that_run() -> None:
    """The half without torch cannot import it."""
    assert memory._FEWEST == chunked_mlp.FEWEST


@pytest.mark.parametrize("plan", ["ring_2", "usp_2x2+megatron_sp_2"])
@pytest.mark.parametrize("length", [512, 16384])
def test_what_runs_again(plan: str, length: int) -> None:
    """The second run of a block; of a long one the MLP runs in chunks of tokens."""
    selective = with_memory(plan, checkpoint="selective")
    report = seqcomp.explain(LLAMA, selective, seq_len=length, dtype="bf16")
    (said,) = [row.bytes for row in report.footprint if row.what == "recomputed block"]
    resolved, run = planned(selective, SHAPE, length), Run(length, 1, "bf16")
    (block,) = SHAPE.blocks
    found = made_again(resolved, SHAPE, block, widths_of(resolved, run), run)
    assert found == pytest.approx(said, rel=0.02)
    assert any("chunks of tokens" in row.what for row in report.memory) == (length > 512)


LARGE = LLAMA.replace("vocab_size=128", f"vocab_size={decoder.LARGE // 64}")
BIG = ModelShape.decoder(
    layers=LAYERS, hidden=64, heads=8, kv_heads=4, vocab=decoder.LARGE // 64, mlp_width=96
)


CHUNKED = {
    "mesh": {"data": 2, "ring": 2, "tensor": 2},
    "strategies": {"data": {}, "ring": {}, "megatron_sp": {}, "fsdp": {"axes": ["data"]}},
    "memory": {"checkpoint": "selective", "loss_chunks": 2},
    "outputs": {"logits": "drop"},
}


@pytest.mark.parametrize("plan", ["usp_2x2+fsdp", CHUNKED], ids=["usp", "hsdp"])
def test_large_embeddings_are_gathered_by_themselves(plan: Any) -> None:
    """And again in backward, as real vocabularies are; but a head in chunks with the root."""
    assert decoder.LARGE == fsdp_units.LARGE
    report = seqcomp.explain(LARGE, plan, seq_len=S, dtype="bf16")
    resolved, run = planned(plan, BIG, S), Run(S)
    work = workload_of(resolved, BIG, run)
    steps = [s for block in work.blocks for s in block.all] * LAYERS + [s for _, s in work.ends]
    assert without_buckets(sent(report.comm)) == without_buckets(sent(steps))
    held = {row.what: row.bytes for row in memory_rows(resolved, BIG, run)}
    said = {row.what: row.bytes for row in report.footprint}
    assert held["gathered parameters"] == said["gathered parameters"]


def test_what_is_apart_is_read_off_modules() -> None:
    module = build_model(LARGE)
    sizes = _Sizes(64, BIG.vocab, BIG.embedding, BIG.head, 64, frozen=0)
    assert tuple(_apart(module, ["model.layers.0", "model.layers.1"], sizes)) == BIG.apart
