"""Calls that are made up for models whose signature says enough."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from seqcomp.capture.call import signature_of
from seqcomp.diagnostics import PlanError, diagnostic

_TOKENS = ("input_ids", "tokens", "ids")


def example_call(
    module: torch.nn.Module, length: int = 32, batch: int = 2, *, labels: bool = False
) -> dict[str, Any]:
    """A call of a model of token ids, of images or of embedded tokens, with no particular values.

    Token ids are [batch, length]; the images of a config with `image_size` [batch, channels,
    height, width], whatever `length` is, for its model makes the tokens; spectra beside the tokens
    of a decoder [batch, bins, frames], as many as the encoder takes; embedded tokens [batch,
    length, hidden]. labels: with those of every token, where the model takes them and has logits
    for every token.

    Raises PlanError SC309 for others.
    """
    parameters = signature_of(module.forward).parameters
    name = next((n for n in _TOKENS if n in parameters), None)
    made: dict[str, Any] = {}
    if name is None:
        made = _media(module, parameters, length, batch)
        name = next(iter(made), None)
    others = [
        p.name
        for p in parameters.values()
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name != name
    ]
    if name is None or others:
        raise PlanError(
            [
                diagnostic(
                    "SC309",
                    where=type(module).__name__,
                    found=f"forward({', '.join(parameters)})",
                    legal="a forward that needs input_ids, tokens or ids alone, images of a "
                    "config's size, or embedded tokens; or example_inputs",
                    help="pass example_inputs={...} with the arguments of one call",
                )
            ]
        )
    # A decoder beside an encoder has tokens of its own, though its signature gives them a default.
    names = [n for n in (name, "decoder_input_ids") if n in parameters and n not in made]
    if not names:
        return made
    head = getattr(module, "get_output_embeddings", None)
    if labels and "labels" in parameters and (head is None or head() is not None):
        names.append("labels")
    device = _weight(module).device
    return made | {n: torch.empty((batch, length), dtype=torch.long, device=device) for n in names}


def _media(
    module: torch.nn.Module,
    parameters: Mapping[str, inspect.Parameter],
    length: int,
    batch: int,
) -> dict[str, Any]:
    """Floating inputs of models of transformers, in the dtype of the weights; {} for others."""
    config, weight = getattr(module, "config", None), _weight(module)
    frames, mels = (getattr(config, n, None) for n in ("max_source_positions", "num_mel_bins"))
    if "input_features" in parameters and "decoder_input_ids" in parameters and frames and mels:
        # Two strides of the encoder's convolutions make one token of two frames.
        return {"input_features": weight.new_empty((batch, mels, 2 * frames))}
    size = getattr(config, "image_size", None)
    channels = getattr(config, "num_channels", None)
    hidden = getattr(config, "hidden_size", None)
    if "pixel_values" in parameters and size and channels:
        sides = (size, size) if isinstance(size, int) else tuple(size)
        return {"pixel_values": weight.new_empty((batch, channels, *sides))}
    if "inputs_embeds" in parameters and hidden:
        return {"inputs_embeds": weight.new_empty((batch, length, hidden))}
    return {}


def _weight(module: torch.nn.Module) -> torch.Tensor:
    """A floating parameter, for its device and dtype."""
    floating = (p for p in module.parameters() if p.is_floating_point())
    return next(floating, torch.empty(()))
