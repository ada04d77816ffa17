"""What explain and estimate say that a rank keeps for the backward, against what autograd keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import seqcomp
from seqcomp.cost.memory import memory_rows
from seqcomp.cost.run import Run
from seqcomp.integrations.models import build_model
from seqcomp.integrations.shapes import model_shape
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve
from seqcomp.verify.lockstep import lockstep
from tests.fixtures.work import work_of
from tests.unit.cost.test_workload import with_memory

S, BATCH, VOCAB = 64, 1, 128
PLAIN = (
    f"num_hidden_layers=2&hidden_size=64&intermediate_size=96&num_attention_heads=4&"
    f"vocab_size={VOCAB}&pad_token_id=0"
)
GROUPED = f"{PLAIN}&num_key_value_heads=2"
ROUTED = f"{GROUPED}&num_local_experts=4&num_experts_per_tok=2"
MODELS = {
    "mixtral": f"hf:MixtralForCausalLM?{ROUTED}",
    "qwen3 moe": f"hf:Qwen3MoeForCausalLM?{GROUPED}&num_experts=4&"
    "num_experts_per_tok=2&moe_intermediate_size=48",
    "gpt-oss": f"hf:GptOssForCausalLM?{ROUTED}&head_dim=16&sliding_window=16",
    "deepseek": f"hf:DeepseekV3ForCausalLM?{PLAIN}&num_key_value_heads=4&q_lora_rank=32&"
    "kv_lora_rank=16&qk_nope_head_dim=16&qk_rope_head_dim=8&v_head_dim=16&n_group=1&topk_group=1&"
    "num_experts_per_tok=2&moe_intermediate_size=48&n_routed_experts=4&first_k_dense_replace=1",
    "glm": f"hf:GlmForCausalLM?{GROUPED}&head_dim=16",
    "bert": f"hf:BertForMaskedLM?{PLAIN}&hidden_dropout_prob=0&attention_probs_dropout_prob=0",
}
CELLS: list[tuple[str, Any]] = [
    ("mixtral", "megatron_sp_2"),
    ("mixtral", with_memory("megatron_sp_2", checkpoint="block")),
    ("qwen3 moe", "data_2"),
    ("gpt-oss", "ring_2"),
    ("deepseek", "ulysses_2"),
    ("glm", "ulysses_2"),
    ("bert", "megatron_sp_2"),
]


@pytest.mark.parametrize(("name", "plan"), CELLS, ids=str)
def test_as_autograd_keeps(name: str, plan: Any) -> None:
    """Too much is as wrong as too little. Experts run untraced; of a copy behind attention, of
    tables of positions and of logits in another dtype each was missed once, or counted twice."""
    spec = MODELS[name]
    kept = max(measured(spec, plan))
    report = seqcomp.explain(spec, plan, seq_len=S, batch=BATCH, dtype="fp32")
    (said,) = [row for row in report.footprint if row.what == "saved activations"]
    assert not said.at_least
    assert said.bytes == pytest.approx(kept, rel=0.03)
    shape, run = model_shape(spec), Run(S, BATCH, "fp32")
    resolved = resolve(load_plan(plan), shape.facts, seq_len=S)
    held = {row.what: row.bytes for row in memory_rows(resolved, shape, run)}
    wanted = ("saved activations", "saved outside of blocks", "masks of attention")
    assert sum(held.get(what, 0) for what in wanted) == pytest.approx(kept, rel=0.1)


def measured(spec: str, plan: Any) -> list[int]:
    """Bytes of storages that hooks see on every rank of a compiled model."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return build_model(spec, "cpu").float()

    def step(model: Any, context: Any, local: dict[str, Any]) -> int:
        own = {key: value.clone() for key, value in local.items()}  # no part of the whole batch
        model(**own)
        return work_of(model, VOCAB, lambda: model(**own).loss, backward=False).saved_bytes

    ids = torch.randint(3, VOCAB, (BATCH * load_plan(plan).mesh.get("data", 1), S))
    return lockstep(made, plan, step, inputs={"input_ids": ids, "labels": ids})
