"""A model of a spec with weights, and a call of it, for verification. Both can be pickled."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.integrations.models import build_model

if TYPE_CHECKING:
    from torch import nn

IGNORED = -100
_SHARE = 0.8  # of the machine's memory


@dataclass(frozen=True)
class SampleModel:
    """Builds a spec's model with new weights. dtype: name of a torch dtype; mode: eval | train."""

    spec: str
    dtype: str = "float64"
    mode: str = "eval"

    def __call__(self) -> nn.Module:
        import torch

        model = build_model(self.spec, device="cpu").to(getattr(torch, self.dtype))
        return model.train(self.mode == "train")


@dataclass(frozen=True)
class SampleInputs:
    """Random inputs of a model of tokens [batch, length], with labels (some of them ignored) where
    it takes them, of images, of speech or of embedded tokens. dtype: of floating ones.

    Raises PlanError SC309 for other models, SC503 where images do not give `length` tokens.
    """

    spec: str
    batch: int
    length: int
    dtype: str = "float64"

    def __call__(self) -> dict[str, Any]:
        import torch

        from seqcomp.capture.call import signature_of
        from seqcomp.capture.example import example_call

        model = build_model(self.spec)
        shapes = example_call(model, length=self.length, batch=self.batch)
        draw = torch.Generator().manual_seed(1)
        kind = getattr(torch, self.dtype)
        media = {
            n: torch.randn(x.shape, generator=draw, dtype=kind)
            for n, x in shapes.items()
            if x.is_floating_point()
        }
        if media:
            require_tokens(model, self.spec, self.length)
        if len(media) == len(shapes):
            return media
        words = min(
            (m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)),
            default=2,
        )
        ids = torch.randint(0, words, (self.batch, self.length), generator=draw)
        call = dict.fromkeys(shapes, ids) | media
        if "labels" in signature_of(model.forward).parameters:
            ignored = torch.rand(ids.shape, generator=draw) < 0.2
            call["labels"] = ids.masked_fill(ignored, IGNORED)
        return call


def require_tokens(model: nn.Module, spec: str, length: int) -> None:
    """Raises PlanError SC503 where a model makes another number of tokens of its inputs."""
    from seqcomp.capture.facts import model_facts

    made = model_facts(model).length
    if made is not None and made != length:
        raise PlanError(wrong_length(spec, length, made))


def wrong_length(where: str, length: int, made: int) -> Diagnostic:
    """SC503: `made` tokens, of which a caller believes that they are `length`."""
    return diagnostic(
        "SC503",
        where=where,
        message="the inputs of the model give another number of tokens",
        found=length,
        legal=made,
        help=f"--seq-len {made} (seq_len={made}), which is what its inputs make",
    )


def require_memory(spec: str, dtype: str, copies: int) -> None:
    """Raises PlanError SC026 where `copies` of the weights and gradients exceed the memory."""
    import torch

    size = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    count = sum(p.numel() for p in build_model(spec).parameters())
    need = 2 * count * size * copies
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > _SHARE * have:
        raise PlanError(
            diagnostic(
                "SC026",
                where=spec,
                found=f"{copies} x {2 * count * size / 2**30:.1f} GiB of weights and gradients",
                legal=f"{_SHARE * have / 2**30:.1f} GiB on this machine",
                help="verify the same architecture with fewer layers and a smaller vocabulary: "
                "hf:<Architecture>?num_hidden_layers=2&vocab_size=512&...",
            )
        )
