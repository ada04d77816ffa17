"""Shapes of modules for the cost model."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from seqcomp.capture.facts import attentions_of
from seqcomp.cost.memory import memory_rows
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.cost.workload import workload_of
from seqcomp.diagnostics import PlanError
from seqcomp.integrations.cut_weights import cut_weights
from seqcomp.integrations.explain import explain
from seqcomp.integrations.models import build_model
from seqcomp.integrations.shapes import model_shape, read_shape
from seqcomp.integrations.vocabulary import Vocabulary
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve
from tests.fixtures.models import Spec, build
from tests.unit.cost.test_workload import LAYERS, LLAMA, SHAPE


def test_a_module_has_the_shape_of_its_widths() -> None:
    """Llama of transformers; what autograd keeps of it within 1 % of the formula."""
    found = model_shape(LLAMA)
    (block,), (formula,) = found.blocks, SHAPE.blocks
    for name in ("count", "heads", "kv_heads", "head_dim", "mlp_width", "parameters", "mask"):
        assert getattr(block, name) == getattr(formula, name)
    for name in ("hidden", "vocab", "embedding", "head", "other", "layers", "parameters"):
        assert getattr(found, name) == getattr(SHAPE, name)
    assert block.count == LAYERS
    for element in (2, 4):
        for checkpoint, slack in (("none", 0.01), ("selective", 0.01), ("block", 0.0)):
            kept, expected = (b.saved.of(checkpoint, element) for b in (block, formula))
            assert kept == pytest.approx(expected, rel=slack)


def test_blocks_of_different_masks_are_different() -> None:
    module = build(Spec(layers=3, causal=(True, False, True), tied=True))
    layers = list(module.layers)
    found = model_shape(module)
    assert [(b.count, b.mask) for b in found.blocks] == [(2, "causal"), (1, "full")]
    assert found.tied
    assert found.parameters == sum(p.numel() for p in module.parameters())
    assert found.active_parameters == pytest.approx(found.parameters, rel=0.01)
    assert list(module.layers) == layers
    assert [a.causal for a in found.facts.attentions] == [True, False]
    assert found.blocks[0].gated


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return x + out.transpose(1, 2).flatten(2)


class ByNumber(nn.Module):
    """Its blocks are equal; the forward chooses their masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList(Attending() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x, causal=number == 0)
        return self.head(x)


def test_equal_blocks_under_masks_that_the_model_chooses() -> None:
    found = model_shape(ByNumber())
    assert [(b.count, b.mask) for b in found.blocks] == [(1, "causal"), (1, "full")]


GEMMA = (
    "hf:Gemma2ForCausalLM?hidden_size=32&num_hidden_layers=1&num_attention_heads=4&vocab_size=64&"
    "num_key_value_heads=2&head_dim=8&intermediate_size=48&sliding_window=8"
)


def test_scores_that_are_written_down_are_held() -> None:
    """A softcap has no fused kernel: whole attention keeps s x s numbers a head, a ring none."""
    shape, length = model_shape(GEMMA), 256
    assert [b.scores for b in shape.blocks] == [2]
    for name, scores in (("data_2", True), ("ring_2", False)):
        report = explain(GEMMA, name, seq_len=length, dtype="bf16")
        held = {row.what: row.bytes for row in report.footprint}["saved activations"]
        plan = resolve(load_plan(name), shape.facts, seq_len=length)
        rows = {row.what: row.bytes for row in memory_rows(plan, shape, Run(length))}
        ours = rows["saved activations"] + rows["saved outside of blocks"]
        assert ours == pytest.approx(held, rel=0.1)
        assert (held > 2 * 4 * 2 * length**2) == scores
    # It ends in a norm, which wants the last sum over tensor ranks of a second run.
    again = {**load_plan("megatron_sp_2").to_dict(), "memory": {"checkpoint": "block"}}
    report = explain(GEMMA, again, seq_len=length, dtype="bf16")
    plan = resolve(load_plan(again), shape.facts, seq_len=length)
    sent = workload_of(plan, shape, Run(length)).bytes_sent(shape, "backward")
    assert sent == report.bytes_sent("backward")
    # Its mask is added, and comes into a block from outside.
    held = {row.what: row.bytes for row in report.footprint}["saved activations"]
    rows = {row.what: row.bytes for row in memory_rows(plan, shape, Run(length))}
    ours = rows["saved activations"] + rows["saved outside of blocks"]
    assert ours + rows["masks of attention"] == pytest.approx(held, rel=0.1)
    assert rows["masks of attention"] == 2 * length**2


GPT2 = "hf:GPT2LMHeadModel?n_embd=64&n_layer=1&n_head=4&vocab_size=128&n_positions=256"


def test_dropout() -> None:
    """With that of attention no plan holds s x s numbers, though no fused kernel has it; behind a
    block's last sum it needs none of what that gives, which no second run sends."""
    shape, length = model_shape(GPT2), 256
    for checkpoint in ("none", "block"):
        given = {**load_plan("megatron_sp_2").to_dict(), "memory": {"checkpoint": checkpoint}}
        report = explain(GPT2, given, seq_len=length, dtype="bf16")
        plan = resolve(load_plan(given), shape.facts, seq_len=length)
        sent = workload_of(plan, shape, Run(length)).bytes_sent(shape, "backward")
        assert sent == report.bytes_sent("backward")
        held = {row.what: row.bytes for row in report.footprint}["saved activations"]
        rows = {row.what: row.bytes for row in memory_rows(plan, shape, Run(length))}
        ours = rows["saved activations"] + rows["saved outside of blocks"]
        assert ours == pytest.approx(held, rel=0.1)
        assert "masks of attention" not in rows


LLAMA_TIED = f"{LLAMA}&tie_word_embeddings=true"


def test_a_tied_embedding_is_held_once_and_cut() -> None:
    shape = model_shape(LLAMA_TIED)
    report = explain(LLAMA_TIED, "megatron_sp_2", seq_len=64, dtype="bf16")
    held = {row.what: row.bytes for row in report.footprint}["parameters"]
    plan = resolve(load_plan("megatron_sp_2"), shape.facts, seq_len=64)
    assert {r.what: r.bytes for r in memory_rows(plan, shape, Run(64))}["parameters"] == held


MIXTRAL = (
    "hf:MixtralForCausalLM?hidden_size=32&num_hidden_layers=1&num_attention_heads=4&vocab_size=64&"
    "num_key_value_heads=2&intermediate_size=48&num_local_experts=4"
)


def test_tensor_ranks_send_nothing_for_experts() -> None:
    """They run on a rank's own tokens, also in the second run of a checkpoint."""
    shape = model_shape(MIXTRAL)
    plan = {
        "mesh": {"tensor": 2},
        "strategies": {"megatron_sp": {}},
        "memory": {"checkpoint": "block"},
    }
    report = explain(MIXTRAL, plan, seq_len=64, dtype="bf16")
    work = workload_of(resolve(load_plan(plan), shape.facts, seq_len=64), shape, Run(64))
    for phase in ("forward", "backward"):
        assert work.bytes_sent(shape, phase) == report.bytes_sent(phase)


def test_a_model_without_a_head_has_no_logits_and_no_loss() -> None:
    headless = LLAMA.replace("LlamaForCausalLM", "LlamaModel")
    shape = model_shape(headless)
    assert (shape.vocab, shape.head, shape.tied) == (0, 0, False)
    for name in ("usp_2x2", "ring_2+megatron_sp_2"):
        report = explain(headless, name, seq_len=64, dtype="bf16")
        plan = resolve(load_plan(name), shape.facts, seq_len=64)
        work = workload_of(plan, shape, Run(64))
        for phase in ("forward", "backward"):
            assert work.bytes_sent(shape, phase) == report.bytes_sent(phase)
        assert not any("logits" in row.what for row in memory_rows(plan, shape, Run(64)))


SIGLIP = (
    "hf:SiglipVisionModel?hidden_size=64&num_hidden_layers=1&num_attention_heads=4&patch_size=8&"
    "intermediate_size=96&image_size=32&vision_use_head=false"
)


def test_a_model_of_images() -> None:
    """It makes its 16 tokens itself; estimates take any number of them."""
    shape = model_shape(SIGLIP)
    (block,) = shape.blocks
    assert (shape.vocab, shape.embedding, shape.hidden, block.mask) == (0, 0, 64, "full")
    report = explain(SIGLIP, "usp_2x2", seq_len=16, dtype="bf16")
    plan = resolve(load_plan("usp_2x2"), shape.facts, seq_len=16)
    work = workload_of(plan, shape, Run(16))
    for phase in ("forward", "backward"):
        assert work.bytes_sent(shape, phase) == report.bytes_sent(phase)
    held = {row.what: row.bytes for row in report.footprint}
    ours = {row.what: row.bytes for row in memory_rows(plan, shape, Run(16))}
    assert ours["parameters"] == held["parameters"]
    saved = ours["saved activations"] + ours["saved outside of blocks"]
    assert saved == pytest.approx(held["saved activations"], rel=0.1)


FUSED = (
    "hf:Phi3ForCausalLM?hidden_size=32&num_hidden_layers=1&num_attention_heads=4&vocab_size=64&"
    "num_key_value_heads=2&intermediate_size=48&pad_token_id=0"
)
BIASED = "hf:GPT2LMHeadModel?n_embd=32&n_layer=1&n_head=4&vocab_size=64&n_positions=128"


def check_weights(spec: str, shape: ModelShape) -> None:
    """What 4 tensor ranks hold of them, and send."""
    report = explain(spec, "megatron_sp_4", seq_len=64, dtype="bf16")
    held = {row.what: row.bytes for row in report.footprint}
    plan = resolve(load_plan("megatron_sp_4"), shape.facts, seq_len=64)
    rows = {row.what: row.bytes for row in memory_rows(plan, shape, Run(64))}
    assert rows["parameters"] == held["parameters"]
    assert workload_of(plan, shape, Run(64)).bytes_sent(shape) == report.bytes_sent()


@pytest.mark.parametrize("spec", [FUSED, BIASED], ids=["phi3", "gpt2"])
def test_weights_that_stay_whole_are_held_whole(spec: str) -> None:
    """Of fused weights the work alone is divided: they are held, and their gradients summed, by
    every tensor rank; biases of columns are cut."""
    shape = model_shape(spec)
    (block,) = shape.blocks
    assert block.parameters.fused > 0
    check_weights(spec, shape)


QWEN = (
    "hf:Qwen3ForCausalLM?hidden_size=64&num_hidden_layers=1&num_attention_heads=8&vocab_size=64&"
    "num_key_value_heads=2&head_dim=16&intermediate_size=96"
)


def test_norms_of_keys_that_every_tensor_rank_makes() -> None:
    """Beyond the KV heads keys are projected whole, scaled by tokens and gathered again."""
    shape, length = model_shape(QWEN), 256
    again = {**load_plan("megatron_sp_4").to_dict(), "memory": {"checkpoint": "selective"}}
    plans = (("megatron_sp_4", "bf16"), ("megatron_sp_8", "fp32"), (again, "bf16"),
             ("ring_2+megatron_sp_4", "bf16"))  # fmt: skip
    for name, dtype in plans:
        report = explain(QWEN, name, seq_len=length, dtype=dtype)
        plan = resolve(load_plan(name), shape.facts, seq_len=length)
        run = Run(length, dtype=dtype)
        for phase in ("forward", "backward"):
            assert workload_of(plan, shape, run).bytes_sent(shape, phase) == (
                report.bytes_sent(phase)
            )
        rows = {row.what: row.bytes for row in memory_rows(plan, shape, run)}
        held = {row.what: row.bytes for row in report.footprint}["saved activations"]
        ours = rows["saved activations"] + rows["saved outside of blocks"]
        assert ours == pytest.approx(held, rel=0.05)


SQUARE = BIASED.replace("vocab_size=64", "vocab_size=128")


@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_table_of_positions_is_no_head(tied: str) -> None:
    """128 of them, as words: they are whole on every tensor rank."""
    spec = f"{SQUARE}&tie_word_embeddings={tied}"
    shape = model_shape(spec)
    assert (shape.embedding, shape.tied) == (128 * 32, tied == "true")
    assert shape.head == (0 if shape.tied else 128 * 32)
    assert shape.other == 128 * 32 + 2 * 32  # and the last norm
    check_weights(spec, shape)


def test_of_a_plain_module_linears_are_heads() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.words = nn.Parameter(torch.ones(8, 4)), nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)

    module = Plain()
    found = Vocabulary.of(module, 8, 4)
    assert found.embedding is module.words.weight
    assert [id(p) for p in found.heads] == [id(module.head.weight)]
    assert found.among(module.parameters()) == (32, 32)
    module.head.weight = module.words.weight
    assert Vocabulary.of(module, 8, 4).among(module.parameters()) == (32, 0)


def test_attention_whose_linears_run_by_tokens() -> None:
    """Norms over all heads keep them whole: their weights are held and their gradients summed by
    every tensor rank, and heads travel in place of hidden states."""
    shape, length = model_shape(OLMO), 64
    (block,) = shape.blocks
    assert block.by_tokens
    assert (block.key_norm, shape.by_tokens) == (None, ())
    again = {**load_plan("ring_2+megatron_sp_4").to_dict(), "memory": {"checkpoint": "block"}}
    for name in ("megatron_sp_2", again):
        report = explain(OLMO, name, seq_len=length, dtype="bf16")
        plan = resolve(load_plan(name), shape.facts, seq_len=length)
        work = workload_of(plan, shape, Run(length))
        sent = Counter[tuple[str, str]]()
        for step in (*work.blocks[0].all, *(s for _, s in work.ends)):
            sent[step.kind, step.phase] += step.bytes_sent
        theirs = Counter[tuple[str, str]]()
        for row in report.comm:
            theirs[row.kind, row.phase] += row.bytes_sent
        assert sent == theirs
        held = {row.what: row.bytes for row in report.footprint}
        rows = {row.what: row.bytes for row in memory_rows(plan, shape, Run(length))}
        assert rows["parameters"] == held["parameters"]


def test_what_has_no_partner_is_known() -> None:
    """Norms over all heads keep q, k, v and o whole, by tokens."""
    capture, infos = attentions_of(build_model(OLMO))
    found = cut_weights(capture, infos, ["model.layers.0"])
    at = "model.layers.0.self_attn"
    assert set(found.by_tokens) == {f"{at}.{name}_proj" for name in "qkvo"}
    assert f"{at}.o_proj.weight" in found.whole
    assert "model.layers.0.mlp.up_proj.weight" not in found.whole
    assert found.ends_in_norm("model.layers.0")


OLMO = (
    "hf:Olmo2ForCausalLM?hidden_size=32&num_hidden_layers=1&num_attention_heads=4&vocab_size=64&"
    "num_key_value_heads=2&intermediate_size=48"
)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = build(Spec(layers=1)), build(Spec(layers=1))

    def forward(self, ids: object) -> object:
        return self.first(ids)["logits"] + self.second(ids)["logits"]


def test_refusals() -> None:
    for model, code in (("llama3-8c", "SC020"), ("hf:Nothing", "SC020"), (Two(), "SC022")):
        with pytest.raises(PlanError) as caught:
            read_shape(model) if isinstance(model, str) else model_shape(model)
        assert caught.value.diagnostics[0].code == code
    with pytest.raises(PlanError, match="seqcomp explain"):
        model_shape(Two())
    with pytest.raises(PlanError, match="did you mean llama3-8b"):
        read_shape("llama3-8c")


def test_names_need_no_module() -> None:
    assert isinstance(read_shape("gpt-175b"), ModelShape)
