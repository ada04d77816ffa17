"""Estimates of encoder-decoders beside what the compiled model sends, keeps and computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from seqcomp.capture.example import example_call
from seqcomp.cost.estimate import estimate
from seqcomp.cost.flops import flops_of
from seqcomp.cost.memory import cache_bytes, memory_rows
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.cost.workload import workload_of
from seqcomp.hardware.load import load_cluster
from seqcomp.integrations.explain import explain
from seqcomp.integrations.models import build_model
from seqcomp.integrations.shapes import model_shape
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve

T5 = (
    "hf:T5ForConditionalGeneration?d_model=64&d_kv=16&d_ff=96&num_layers=1&num_decoder_layers=1&"
    "num_heads=4&vocab_size=128"
)
_SIZES = (
    "d_model=64&encoder_layers=1&decoder_layers=1&encoder_attention_heads=4&"
    "decoder_attention_heads=4&encoder_ffn_dim=96&decoder_ffn_dim=96&vocab_size=128"
)
BART = f"hf:BartForConditionalGeneration?{_SIZES}&max_position_embeddings=1024&dropout=0.0"
FRAMES = 48
WHISPER = (
    f"hf:WhisperForConditionalGeneration?{_SIZES}&num_mel_bins=8&pad_token_id=0&"
    f"max_source_positions={FRAMES}&max_target_positions=1024"
)
LENGTH = 256
AGAIN = {**load_plan("megatron_sp_2").to_dict(), "memory": {"checkpoint": "block"}}
KEEPS = {**load_plan("usp_2x2").to_dict(), "memory": {"checkpoint": "selective"}}


def check(spec: str, shape: ModelShape, plan: str | Mapping[str, Any]) -> set[str]:
    """Bytes are equal, saved activations within 10 %; gives the codes of the compiled model."""
    report = explain(spec, plan, seq_len=LENGTH, dtype="bf16")
    resolved, run = resolve(load_plan(plan), shape.facts, seq_len=LENGTH), Run(LENGTH)
    work = workload_of(resolved, shape, run)
    for phase in ("forward", "backward"):
        assert work.bytes_sent(shape, phase) == report.bytes_sent(phase)
    rows = {row.what: row.bytes for row in memory_rows(resolved, shape, run)}
    held = {row.what: row.bytes for row in report.footprint}
    assert rows["parameters"] == held["parameters"]
    assert rows["gradients"] == held["gradients"]
    saved = rows["saved activations"] + rows["saved outside of blocks"]
    assert saved == pytest.approx(held["saved activations"], rel=0.1)
    found = estimate(resolved, shape, load_cluster("h100"), run)
    assert found.step_seconds > 0
    assert "SC427" in {f.code for f in found.findings}
    ours, theirs = ({f.code for f in item.findings} for item in (resolved, report))
    assert ("SC208" in ours) == ("SC208" in theirs)  # masks of data may be causal
    return theirs


def check_flops(spec: str, shape: ModelShape, biases: int) -> None:
    """Of a forward of the original: products in and behind the blocks; biases, which torch does not
    count, are those of all tokens."""
    module = build_model(spec, device="cpu")
    module.set_attn_implementation("eager")  # torch counts no fused attention on a CPU
    call = {n: torch.ones_like(x) for n, x in example_call(module, LENGTH, 1, labels=True).items()}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(**call, use_cache=False)
    plan = resolve(load_plan("ring_1"), shape.facts, seq_len=LENGTH)
    ours = flops_of(plan, shape, Run(LENGTH))["full"] / 3
    counted = counter.get_flop_counts()["Global"]
    outside = counted.get(torch.ops.aten.convolution, 0)  # which makes the tokens of speech
    assert ours - 2 * biases == counter.get_total_flops() - outside


def test_of_tokens_with_a_table_of_biases() -> None:
    """T5: the source is as long as the target, and divided as that; its gather is one for all."""
    shape = model_shape(T5)
    encoder, decoder = shape.blocks
    assert (encoder.cross, encoder.source, shape.sequences) == (None, 0, 2)
    assert decoder.cross is not None
    assert decoder.parameters.kv == 2 * decoder.cross.kv == 2 * encoder.parameters.kv
    for plan in ("ring_2+megatron_sp_2", "megatron_sp_2", KEEPS):  # with dropout, in tiles always
        assert "SC402" not in check(T5, shape, plan)
    check_flops(T5, shape, 0)


def test_of_tokens_whose_blocks_end_in_norms() -> None:
    shape = model_shape(BART)
    assert [b.starts_in_product for b in shape.blocks] == [True, True]
    assert shape.blocks[1].mask == "causal"
    for plan in ("usp_2x2", AGAIN):
        check(BART, shape, plan)
    # Of columns, which are cut: queries, keys and values of each attention, and the MLP's first.
    cut = sum(3 * 64 * block.attentions + 96 for block in shape.blocks)
    check_flops(BART, shape, LENGTH * cut)


def test_of_speech_every_rank_has_all() -> None:
    """Whisper makes a fixed number of tokens itself: ring and ulysses repeat the encoder (SC402),
    tensor ranks add up in place of gathers."""
    shape = model_shape(WHISPER)
    assert shape.vocab == 128
    encoder, decoder = shape.blocks
    assert decoder.cross is not None
    assert (encoder.source, decoder.source, decoder.cross.source) == (FRAMES, 0, FRAMES)
    assert shape.frozen == FRAMES * 64
    assert "SC402" in check(WHISPER, shape, "usp_2x2")
    for plan in ("ring_2+megatron_sp_2", AGAIN):
        check(WHISPER, shape, plan)
    # Whisper's keys have no bias.
    check_flops(WHISPER, shape, FRAMES * (2 * 64 + 96) + LENGTH * (4 * 64 + 96))
    # Its own keys are cached for the tokens of a rank, those of the source whole.
    ring = resolve(load_plan("ring_4"), shape.facts, seq_len=LENGTH)
    size = cache_bytes(ring, shape, Run(LENGTH, mode="prefill"))
    assert size == (LENGTH // 4 + FRAMES) * 2 * 64 * 2
