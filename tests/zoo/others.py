"""Encoder-decoders, vision, speech, torchtitan's decoders, and modules written by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fixtures.families import (
    Encoder,
    TitanWithLoss,
    titan,
    titan_documents,
    titan_flex,
    titan_gpt_oss,
    titan_windows,
)
from tests.zoo.entry import (
    BATCH,
    LENGTH,
    SMALL,
    VOCAB,
    Entry,
    Inputs,
    drawn,
    hf,
    ids,
    labelled,
    packed,
    padded,
)

T5 = {"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
      "dropout_rate": 0.0, "decoder_start_token_id": 0}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
WHISPER = {
    **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}, "num_mel_bins": 8,
    "max_source_positions": 16, "max_target_positions": 64, "begin_suppress_tokens": None,
    "suppress_tokens": None,
}  # fmt: skip
VISION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 96, "image_size": 32, "patch_size": 8}  # fmt: skip
PORTRAIT = {**VISION, "image_size": (40, 24)}
WAVE = {
    **SMALL, "conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (4, 2),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def shorter_target() -> Inputs:
    """An encoder of LENGTH tokens, a decoder of half as many."""
    return {"input_ids": ids(), "labels": ids(LENGTH // 2, seed=5)}


def longer_target() -> Inputs:
    """An encoder of half as many tokens as the decoder."""
    return {"input_ids": ids(LENGTH // 2), "labels": ids(seed=5)}


def images(height: int = 32, width: int = 32) -> Inputs:
    return {"pixel_values": drawn(BATCH, 3, height, width)}


def portraits() -> Inputs:
    """15 patches of 8 x 8: with a class token they are 16 tokens."""
    return images(40, 24)


def patches() -> Inputs:
    return {"inputs_embeds": drawn(BATCH, LENGTH, 64)}


def on_patches(module: str, name: str) -> Callable[[], nn.Module]:
    """The encoder of a vision tower, on embedded patches [B, S, hidden]."""

    def make() -> nn.Module:
        library = import_module(f"transformers.models.{module}.modeling_{module}")
        config = getattr(library, f"{name}VisionConfig")(**VISION)
        config._attn_implementation = "sdpa"
        return getattr(library, f"{name}Encoder")(config)

    return make


def tokens() -> Inputs:
    return {"input_ids": ids()}


def speech() -> Inputs:
    return {"input_features": drawn(BATCH, 8, 32), "labels": ids(16, seed=5)}


def waves() -> Inputs:
    return {"input_values": drawn(BATCH, 8 * LENGTH)}


t5 = hf("T5ForConditionalGeneration", **T5)
bart = hf("BartForConditionalGeneration", **SEQ2SEQ)
# Sequences of other lengths than the first input's are no sequence for the plan.
WHOLE_LABELS = {"labels": {"batch": 0, "seq": None}}

ENCODER_DECODERS = tuple(
    Entry(name, "encoder-decoder", make, call, inputs)
    for name, make, call, inputs in (
        ("T5 encoder, relative bias", hf("T5EncoderModel", **T5), tokens, None),
        ("T5, relative bias", t5, labelled, None),
        ("T5, padded encoder", t5, padded, None),
        ("T5, shorter target", t5, shorter_target, WHOLE_LABELS),
        ("BART", bart, labelled, None),
        ("BART, padded encoder", bart, padded, None),
        ("BART, longer target", bart, longer_target, WHOLE_LABELS),
        ("Marian, padded encoder", hf("MarianMTModel", **SEQ2SEQ), padded, None),
        ("Whisper", hf("WhisperForConditionalGeneration", **WHISPER), speech,
         {"input_features": {"batch": 0, "seq": 2}, **WHOLE_LABELS}),
    )
)  # fmt: skip
VISION_SPEECH = tuple(
    Entry(name, kind, make, call, inputs)
    for name, kind, make, call, inputs in (
        ("ViT, from images", "vision", hf("ViTModel", **PORTRAIT), portraits, None),
        ("ViT, from images of 17 tokens", "vision", hf("ViTModel", **VISION), images, None),
        ("DeiT, from images", "vision", hf("DeiTModel", **{**VISION, "image_size": (56, 16)}),
         partial(images, 56, 16), None),
        ("DINOv2 with registers, from images", "vision", hf(
            "Dinov2WithRegistersModel", **VISION, num_register_tokens=3), images, None),
        ("CLIP vision, from images", "vision", hf("CLIPVisionModel", **VISION), images, None),
        ("SigLIP vision, from images", "vision", hf("SiglipVisionModel", **VISION), images, None),
        ("Swin, shifted windows, from images", "vision", hf(
            "SwinModel", image_size=32, patch_size=4, embed_dim=32, depths=[2, 2],
            num_heads=[2, 4], window_size=4, drop_path_rate=0.0), images, None),
        ("SigLIP vision encoder, from patches", "vision", on_patches("siglip", "Siglip"),
         patches, None),
        ("CLIP vision encoder, from patches", "vision", on_patches("clip", "CLIP"), patches, None),
        ("wav2vec 2", "speech", hf("Wav2Vec2Model", **WAVE), waves, None),
        ("HuBERT", "speech", hf("HubertModel", **WAVE), waves, None),
    )
)  # fmt: skip


class DiT(nn.Module):
    """A diffusion transformer: adaLN from a timestep, self and cross attention, patches."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(torch.zeros(1, LENGTH, width))
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.text = nn.Linear(12, width)
        self.blocks = nn.ModuleList(_DiTBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, 8)

    def forward(self, x: Tensor, timestep: Tensor, context: Tensor, noise: Tensor) -> Any:
        """x, noise [B, S, 8], timestep [B], context [B, 10, 12] -> loss [], sample [B, S, 8]."""
        frequencies = torch.exp(-torch.arange(8, device=x.device, dtype=x.dtype))
        angles = timestep[:, None] * frequencies
        c = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        h = self.embed(x) + self.position
        text = self.text(context)
        for block in self.blocks:
            h = block(h, c, text)
        shift, scale = self.modulation(F.silu(c)).chunk(2, -1)
        sample = self.out(self.norm(h) * (1 + scale[:, None]) + shift[:, None])
        return {"loss": F.mse_loss(sample, noise), "sample": sample}


class _DiTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.cross_norm = nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.cross_proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, h: Tensor, c: Tensor, text: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(c))[:, None].chunk(
            6, -1
        )
        n = self.norm1(h) * (1 + scale1) + shift1
        h = h + gate1 * self.proj(self._attend(*self.qkv(n).chunk(3, -1)))
        query = self.q(self.cross_norm(h))
        h = h + self.cross_proj(self._attend(query, *self.kv(text).chunk(2, -1)))
        n = self.norm2(h) * (1 + scale2) + shift2
        return h + gate2 * self.down(F.gelu(self.up(n), approximate="tanh"))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def diffusion() -> Inputs:
    return {
        "x": drawn(BATCH, LENGTH, 8), "timestep": drawn(BATCH, seed=4).abs(),
        "context": drawn(BATCH, 10, 12, seed=5), "noise": drawn(BATCH, LENGTH, 8, seed=6),
    }  # fmt: skip


def packed_blocks() -> Inputs:
    """Three documents per row as torchtitan's trainer passes them: positions and a block mask."""
    call = packed()
    positions = call.pop("position_ids")
    return {**call, **titan_documents(positions)}


def packed_windows() -> Inputs:
    """The same, and windows of 8 tokens in every second layer."""
    call = packed()
    positions = call.pop("position_ids")
    return {**call, **titan_windows(positions, 8)}


TITAN = tuple(
    Entry(name, "torchtitan", lambda spec=spec: TitanWithLoss(titan(spec)), labelled)
    for name, spec in (
        ("torchtitan Llama 3", "llama3/debugmodel"),
        ("torchtitan Qwen3", "qwen3/debugmodel"),
    )
) + tuple(
    Entry(name, "torchtitan", lambda spec=spec: TitanWithLoss(titan_flex(spec)), packed_blocks)
    for name, spec in (
        ("torchtitan Llama 3, FlexAttention, packed documents", "llama3/debugmodel"),
        ("torchtitan Qwen3, FlexAttention, packed documents", "qwen3/debugmodel"),
        ("torchtitan DeepSeek-V3, FlexAttention, packed documents", "deepseek_v3/debugmodel"),
    )
) + (
    Entry("torchtitan gpt-oss, FlexAttention, windows, packed documents", "torchtitan",
          lambda: TitanWithLoss(titan_gpt_oss()), packed_windows),
)  # fmt: skip
BY_HAND = (
    Entry("nn.TransformerEncoder", "module", Encoder, labelled),
    Entry("DiT, adaLN, cross attention", "module", DiT, diffusion),
)
