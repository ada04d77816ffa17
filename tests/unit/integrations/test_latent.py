"""Latent attention under megatron_sp: what it sends, holds and saves, as the lowered graph does."""

from __future__ import annotations

from typing import Any

import pytest

from seqcomp.cost.estimate import estimate
from seqcomp.cost.memory import memory_rows
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.cost.workload import workload_of
from seqcomp.hardware.load import load_cluster
from seqcomp.integrations.explain import explain
from seqcomp.integrations.shapes import model_shape
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve
from tests.unit.cost.test_workload import sent, with_memory, without_buckets

S = 64
DEEPSEEK = (
    "hf:DeepseekV3ForCausalLM?hidden_size=64&intermediate_size=96&moe_intermediate_size=32&"
    "num_hidden_layers=1&num_attention_heads=4&num_key_value_heads=4&vocab_size=128&"
    "q_lora_rank=32&kv_lora_rank=16&qk_rope_head_dim=8&qk_nope_head_dim=16&v_head_dim=16&"
    "n_routed_experts=4&n_group=1&topk_group=1&num_experts_per_tok=2&n_shared_experts=1&"
    "first_k_dense_replace="
)


@pytest.fixture(scope="module")
def shapes() -> dict[int, ModelShape]:
    """One block each, by whether it is without experts."""
    return {dense: model_shape(f"{DEEPSEEK}{dense}") for dense in (0, 1)}


@pytest.mark.parametrize(
    ("dense", "plan"),
    [
        (0, "megatron_sp_2"),
        (1, "megatron_sp_4"),
        (1, with_memory("ring_2+megatron_sp_2", checkpoint="selective")),
    ],
    ids=str,
)
def test_as_explained(dense: int, plan: Any, shapes: dict[int, ModelShape]) -> None:
    shape, run = shapes[dense], Run(S, dtype="fp32")
    report = explain(f"{DEEPSEEK}{dense}", plan, seq_len=S, dtype="fp32")
    resolved = resolve(load_plan(plan), shape.facts, seq_len=S)
    work = workload_of(resolved, shape, run)
    steps = [s for b, own in zip(shape.blocks, work.blocks, strict=True) for s in b.count * own.all]
    steps += [step for _, step in work.ends]
    assert without_buckets(sent(report.comm)) == without_buckets(sent(steps))
    said = {row.what: row for row in report.footprint}
    held = {row.what: row.bytes for row in memory_rows(resolved, shape, run)}
    for what in ("parameters", "gradients"):
        assert held[what] == said[what].bytes
    kept = held["saved activations"] + held["saved outside of blocks"]
    # Tables of positions weigh in so small a model.
    slack = 0.05 if resolved.plan.memory.checkpoint == "none" else 0.08
    assert kept == pytest.approx(said["saved activations"].bytes, rel=slack)
    whole = estimate(resolved, shape, load_cluster("h100"), run, advise=False)
    assert whole.exposed["tensor"] > 0


def test_its_products_are_its_parameters(shapes: dict[int, ModelShape]) -> None:
    """Every matrix is counted in one of the pieces of a block."""
    (block,) = shapes[1].blocks
    own, hidden = block.parameters, shapes[1].hidden
    assert own.whole == hidden * (32 + 16 + 8)
    assert own.kv == 16 * 4 * (16 + 16)
    assert block.attention_matrices(hidden) == 32 * 4 * 24 + 4 * 16 * hidden
    assert own.matrices == own.kv + block.attention_matrices(hidden) + 3 * hidden * 96
    assert block.gated
    assert not shapes[0].blocks[0].token_local
