"""Decoders, mixtures of experts and encoders of text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.zoo.entry import GROUPED, SMALL, VOCAB, Entry, Inputs, hf, ids, labelled, packed, padded

GPT2 = {
    "vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    **SMALL, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}


def right() -> Inputs:
    return padded("right")


def left() -> Inputs:
    return padded("left")


def short() -> Inputs:
    """The first 8 tokens: recurrences are captured step by step."""
    return {name: value[:, :8] for name, value in labelled().items()}


def mrope() -> Inputs:
    """Positions [3, batch, sequence] that differ between the axes."""
    return {"input_ids": ids(), "position_ids": torch.stack([ids(seed=n) % 32 for n in (4, 5, 6)])}


def mrope_packed() -> Inputs:
    """The same behind a row of text positions [4, batch, sequence] that tell documents apart."""
    call = mrope()
    text = packed()["position_ids"][None]
    return {**call, "position_ids": torch.cat([text, call["position_ids"]])}


def tokens() -> Inputs:
    return {"input_ids": ids()}


def unlabelled() -> Inputs:
    """Padded tokens without labels."""
    return {name: value for name, value in padded().items() if name != "labels"}


def _decoder(
    name: str, make: Callable[..., object], call: Callable[[], Inputs] = labelled
) -> Entry:
    return Entry(name, "decoder", make, call)


llama = hf("LlamaForCausalLM", **GROUPED)
mistral = hf("MistralForCausalLM", **GROUPED, sliding_window=7)
gpt2 = hf("GPT2LMHeadModel", **GPT2)

DECODERS = (
    _decoder("Llama", llama),
    _decoder("Llama, padded right", llama, right),
    _decoder("Llama, padded left", llama, left),
    _decoder("Llama, packed documents", llama, packed),
    _decoder("Llama, eager attention", hf("LlamaForCausalLM", "eager", **GROUPED)),
    _decoder("Llama, FlexAttention", hf("LlamaForCausalLM", "flex_attention", **GROUPED)),
    _decoder("Mistral, window", mistral),
    _decoder("Mistral, window, FlexAttention", hf(
        "MistralForCausalLM", "flex_attention", **GROUPED, sliding_window=7)),
    _decoder("Mistral, window, padded left", mistral, left),
    _decoder("Mistral, window, packed", mistral, packed),
    _decoder("Qwen2, window in one layer", hf(
        "Qwen2ForCausalLM", **GROUPED, use_sliding_window=True, sliding_window=7,
        max_window_layers=1)),
    _decoder("Qwen3", hf("Qwen3ForCausalLM", **GROUPED, head_dim=16)),
    _decoder("Gemma", hf("GemmaForCausalLM", **GROUPED, head_dim=16)),
    _decoder("Gemma 2, eager, softcap", hf(
        "Gemma2ForCausalLM", "eager", **GROUPED, head_dim=16, sliding_window=7)),
    _decoder("Gemma 3", hf("Gemma3ForCausalLM", **GROUPED, head_dim=16, sliding_window=7)),
    _decoder("GPT-2", gpt2),
    _decoder("GPT-2, padded right", gpt2, right),
    _decoder("GPT-Neo, local attention", hf(
        "GPTNeoForCausalLM", vocab_size=VOCAB, hidden_size=64, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]], window_size=8, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=2)),
    _decoder("GPT-NeoX", hf("GPTNeoXForCausalLM", **SMALL)),
    _decoder("GPT-J", hf(
        "GPTJForCausalLM", vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, rotary_dim=8,
        n_positions=64, bos_token_id=1, eos_token_id=2)),
    _decoder("GPT-BigCode", hf("GPTBigCodeForCausalLM", **GPT2)),
    _decoder("BLOOM, ALiBi", hf(
        "BloomForCausalLM", vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4)),
    Entry("BLOOM, ALiBi, token_local activation", "decoder", hf(
        "BloomForCausalLM", vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4), labelled,
        overrides=({"match": "**.gelu_impl", "token_local": True},)),
    _decoder("MPT, ALiBi", hf(
        "MptForCausalLM", vocab_size=VOCAB, d_model=64, n_layers=2, n_heads=4)),
    _decoder("Falcon", hf(
        "FalconForCausalLM", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, bos_token_id=1, eos_token_id=2)),
    _decoder("Falcon, ALiBi", hf(
        "FalconForCausalLM", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, alibi=True, bos_token_id=1, eos_token_id=2)),
    _decoder("OPT", hf(
        "OPTForCausalLM", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=64)),
    _decoder("Phi", hf("PhiForCausalLM", **GROUPED)),
    _decoder("Phi-3", hf("Phi3ForCausalLM", **GROUPED)),
    _decoder("StableLM", hf("StableLmForCausalLM", **GROUPED)),
    _decoder("StarCoder2", hf("Starcoder2ForCausalLM", **GROUPED)),
    _decoder("Cohere 2, window", hf("Cohere2ForCausalLM", **GROUPED, sliding_window=7)),
    _decoder("OLMo 2", hf("Olmo2ForCausalLM", **GROUPED)),
    _decoder("OLMo 3, window", hf("Olmo3ForCausalLM", **GROUPED, sliding_window=7)),
    _decoder("Granite", hf("GraniteForCausalLM", **GROUPED)),
    _decoder("Nemotron", hf("NemotronForCausalLM", **GROUPED)),
    _decoder("GLM", hf("GlmForCausalLM", **GROUPED, head_dim=16)),
    _decoder("SmolLM3", hf("SmolLM3ForCausalLM", **GROUPED, no_rope_layers=[1, 0])),
    _decoder("Ministral, window", hf(
        "MinistralForCausalLM", **GROUPED, head_dim=16, sliding_window=7)),
    _decoder("Qwen2-VL text, mRoPE", hf(
        "Qwen2VLTextModel", **GROUPED,
        rope_parameters=MROPE), mrope),
    _decoder("Qwen2.5-VL text, mRoPE", hf(
        "Qwen2_5_VLTextModel", **GROUPED, rope_parameters=MROPE), mrope),
    _decoder("Qwen2.5-VL text, mRoPE, packed", hf(
        "Qwen2_5_VLTextModel", **GROUPED, rope_parameters=MROPE), mrope_packed),
    _decoder("Qwen3-VL text, mRoPE", hf(
        "Qwen3VLTextModel", **GROUPED, head_dim=16, rope_parameters=MROPE), mrope),
    _decoder("Qwen3-VL text, mRoPE, packed", hf(
        "Qwen3VLTextModel", **GROUPED, head_dim=16, rope_parameters=MROPE), mrope_packed),
    _decoder("Falcon, grouped heads", hf(
        "FalconForCausalLM", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True, bos_token_id=1,
        eos_token_id=2)),
)  # fmt: skip

# transformers' grouped products, its default, have no fp64 kernel on CPU.
EXPERTS_ROWS = (
    ("Mixtral", hf("MixtralForCausalLM", **GROUPED, num_local_experts=4)),
    ("Qwen3-MoE", hf("Qwen3MoeForCausalLM", **GROUPED, **EXPERTS, num_experts=4, head_dim=16)),
    ("OLMoE", hf("OlmoeForCausalLM", **GROUPED, num_experts=4, num_experts_per_tok=2)),
    ("DeepSeek-V3, latent attention", hf(
        "DeepseekV3ForCausalLM", **LATENT, **EXPERTS, n_routed_experts=4, n_group=1,
        topk_group=1, first_k_dense_replace=1)),
    ("gpt-oss, sinks, window", hf(
        "GptOssForCausalLM", "eager", **GROUPED, head_dim=16, sliding_window=8,
        num_local_experts=4, num_experts_per_tok=2)),
)  # fmt: skip
BALANCED = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
balanced = hf("MixtralForCausalLM", **GROUPED, **BALANCED, experts_implementation="eager")
MIXTURES = tuple(
    Entry(name, "mixture of experts", make, call, dtype=dtype)
    for name, make, call, dtype in (
        *((name, make, labelled, torch.float32) for name, make in EXPERTS_ROWS),
        *(
            (f"{name}, batched_mm", partial(make, experts_implementation="batched_mm"), labelled,
             torch.float64)
            for name, make in EXPERTS_ROWS
        ),
        ("Mixtral, eager experts, balance loss", balanced, labelled, torch.float64),
        ("Mixtral, eager experts, balance loss, padded right", balanced, right, torch.float64),
        ("Llama 4 text, chunked", hf(
            "Llama4ForCausalLM", **GROUPED, head_dim=16, intermediate_size_mlp=96,
            num_local_experts=4, num_experts_per_tok=1, attention_chunk_size=8,
            interleave_moe_layer_step=2), labelled, torch.float64),
    )
)  # fmt: skip

bert = hf("BertForMaskedLM", **SMALL)
DISTIL = {"vocab_size": VOCAB, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4,
          "max_position_embeddings": 64}  # fmt: skip
ENCODERS = tuple(
    Entry(name, "encoder", make, call)
    for name, make, call in (
        ("BERT", bert, labelled),
        ("BERT, padded right", bert, right),
        ("BERT, eager attention, padded left", hf("BertForMaskedLM", "eager", **SMALL), left),
        ("RoBERTa", hf("RobertaForMaskedLM", **SMALL), labelled),
        ("RoBERTa, padded right", hf("RobertaForMaskedLM", **SMALL), right),
        ("DistilBERT", hf("DistilBertForMaskedLM", **DISTIL), right),
        ("ALBERT, one layer's weights", hf("AlbertForMaskedLM", **SMALL, embedding_size=32), right),
        ("ELECTRA", hf("ElectraForMaskedLM", **SMALL, embedding_size=32), right),
        ("MPNet, relative bias", hf("MPNetForMaskedLM", **SMALL), right),
        ("DeBERTa-v2, disentangled", hf(
            "DebertaV2ForMaskedLM", **SMALL, relative_attention=True, max_relative_positions=32,
            position_buckets=8, pos_att_type=["p2c", "c2p"]), labelled),
        ("ModernBERT, window", hf(
            "ModernBertForMaskedLM", **{**SMALL, "num_hidden_layers": 2}, local_attention=8,
            global_attn_every_n_layers=2, reference_compile=False, cls_token_id=1,
            sep_token_id=2), right),
        ("EuroBERT", hf("EuroBertForMaskedLM", **GROUPED), right),
        ("FNet, Fourier transform", hf("FNetForMaskedLM", **{
            k: v for k, v in SMALL.items() if k != "num_attention_heads"}), labelled),
        ("CLIP text", hf("CLIPTextModel", **SMALL), unlabelled),
        ("SigLIP text", hf("SiglipTextModel", **SMALL), unlabelled),
    )
)  # fmt: skip

mamba = hf("MambaForCausalLM", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2,
           pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
mamba2 = hf("Mamba2ForCausalLM", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2,
            num_heads=8, head_dim=16, state_size=8, n_groups=2, chunk_size=8,
            pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
RWKV = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "attention_hidden_size": 64,
        "context_length": 64}  # fmt: skip
jamba = hf("JambaForCausalLM", **GROUPED, num_experts=2, attn_layer_period=2, attn_layer_offset=1,
           expert_layer_period=2, use_mamba_kernels=False, experts_implementation="batched_mm",
           mamba_d_state=8, mamba_dt_rank=8)  # fmt: skip
RECURRENT = tuple(
    Entry(name, "recurrence", make, short, overrides=tuple(
        {"match": match, "gather": True} for match in whole))
    for name, make, *whole in (
        ("Mamba", mamba),
        ("Mamba, gather: true", mamba, "backbone.layers.*.mixer"),
        ("Mamba 2", mamba2),
        ("Mamba 2, gather: true", mamba2, "backbone.layers.*.mixer"),
        ("RWKV", hf("RwkvForCausalLM", **RWKV)),
        ("RWKV, no rescaling", hf("RwkvForCausalLM", **RWKV, rescale_every=0)),
        ("RWKV, no rescaling, gather: true", hf("RwkvForCausalLM", **RWKV, rescale_every=0),
         "rwkv.blocks.*.attention"),
        ("RecurrentGemma", hf("RecurrentGemmaForCausalLM", **{**GROUPED, "num_hidden_layers": 3},
                              attention_window_size=8, lru_width=64)),
        ("Jamba", jamba),
        ("Jamba, gather: true", jamba, "model.layers.*.mamba"),
        ("LFM2, short convolution", hf(
            "Lfm2ForCausalLM", **GROUPED, layer_types=["conv", "full_attention"])),
    )
)  # fmt: skip
