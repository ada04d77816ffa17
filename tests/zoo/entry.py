"""What one row of the support table is: a tiny model and a call of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.fixtures.models import default_dtype

BATCH, LENGTH, VOCAB = 2, 32, 95
Inputs = dict[str, Any]
SMALL: Mapping[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED: Mapping[str, Any] = {**SMALL, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Entry:
    """A row: `make()` builds the module in the default dtype, `call(model)` its arguments.

    kind: the heading that it stands under. inputs: the plan's entries for arguments whose
    dims cannot be told from their sizes. overrides: the plan's, where the row is about them.
    dtype: what it is compared in.
    """

    name: str
    kind: str
    make: Callable[[], nn.Module]
    call: Callable[[], Inputs]
    inputs: Mapping[str, Any] | None = None
    overrides: Sequence[Mapping[str, Any]] = ()
    dtype: torch.dtype = torch.float64


def hf(architecture: str, attention: str | None = None, **config: Any) -> Callable[..., nn.Module]:
    """A class of transformers from its own config class."""

    def make(**more: Any) -> nn.Module:
        import transformers

        cls = getattr(transformers, architecture)
        settings = cls.config_class(**config, **more)
        if attention is not None:
            settings._attn_implementation = attention
        return cls(settings)

    return make


def built(entry: Entry) -> nn.Module:
    """The entry's model in its dtype and eval mode, no weight symmetric, attention not uniform."""
    with default_dtype(torch.float64):
        model = entry.make().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            scale = 1 / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 0.1
            parameter.add_(draw * scale)
    if entry.dtype != torch.float64:
        model = model.to(entry.dtype)
    return model.eval()  # .to(dtype) would make complex tables real


def drawn(*shape: int, seed: int = 3) -> Tensor:
    """Standard normal numbers in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def ids(length: int = LENGTH, seed: int = 3) -> Tensor:
    """Tokens [BATCH, length], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB, (BATCH, length), generator=generator)


def labelled() -> Inputs:
    """Tokens and labels [BATCH, LENGTH]; ignored labels are not spread evenly."""
    labels = ids()
    labels[:, :3] = -100
    labels[0, 20:27] = -100
    return {"input_ids": ids(), "labels": labels}


def padded(side: str = "right") -> Inputs:
    """The same, with an attention_mask: the second sequence has 11 tokens of padding."""
    call = labelled()
    where = slice(LENGTH - 11, None) if side == "right" else slice(None, 11)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, where] = 0
    call["input_ids"][1, where] = 0
    call["labels"][1, where] = -100
    return {**call, "attention_mask": mask}


def packed() -> Inputs:
    """The same, as three documents per row told apart by position_ids that start anew."""
    rows = [(9, 12, 11), (3, 24, 5)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    return {**labelled(), "position_ids": positions}
