"""SC402: products, attention, convolutions and norms that every rank does on whole tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures.exports import exported_once
from tests.fixtures.families import build_family, family_inputs
from tests.fixtures.models import Spec, build, inputs

B, S, H = 2, 16, 8


class Mixer(nn.Module):
    """ids -> embedding -> linear -> `mix` -> linear: tokens are cut on both sides of `mix`."""

    def __init__(self, mix: Callable[[Mixer, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, H)
        self.before = nn.Linear(H, H)
        self.norm = nn.LayerNorm(H)
        self.conv = nn.Conv1d(H, H, 3, padding=1)
        self.square = nn.Parameter(torch.randn(H, H))
        self.register_buffer("frequencies", torch.rand(H))
        self.after = nn.Linear(H, H)
        self.mix = mix

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.after(self.mix(self, self.before(self.embed(input_ids))))


def decay(model: Mixer, x: Tensor) -> Tensor:
    """A mixing matrix of positions alone, [S, S], whole on every rank; its product is real work."""
    at = torch.arange(x.shape[1])
    return (at[:, None] - at).abs().neg().to(x.dtype).exp() @ x


def tables(model: Mixer, x: Tensor) -> Tensor:
    """Rotary angles as a product of a buffer and positions, as transformers makes them."""
    at = torch.arange(x.shape[1]).type_as(x)
    angles = (model.frequencies[None, :, None] @ at[None, None].expand(x.shape[0], -1, -1)).mT
    return x * angles.cos()


# mix -> (repeated operations, their forward FLOPs); the rest of each model is cut.
REPEATED: dict[str, tuple[Callable[[Mixer, Tensor], Tensor], str, int]] = {
    "norm behind a flip": (
        lambda m, x: nn.functional.layer_norm(x.flip(1), (H,)), "layer_norm", 8 * B * S * H,
    ),
    "gram matrix behind a flip": (
        lambda m, x: torch.einsum("bsh,bth->bst", x.flip(1), x.flip(1)).tril().sum(
            2, keepdim=True
        ) * x,
        "einsum", 2 * B * S * S * H,
    ),
    "softmax over rows": (
        lambda m, x: (x @ x.transpose(1, 2)).softmax(1) @ x, "matmul", 2 * B * S * S * H,
    ),
    "a mixing matrix": (decay, "matmul", 2 * B * S * S * H),
    "a state summed over tokens": (
        lambda m, x: x * torch.einsum("bsh,bsk->bhk", x.flip(1), x.flip(1)).sum(1)[:, None],
        "einsum", 2 * B * S * H * H,
    ),
    "convolution of stride 2": (
        lambda m, x: x + nn.functional.conv1d(
            x.transpose(1, 2), m.conv.weight, stride=2, padding=1
        ).transpose(1, 2).sum(1, keepdim=True),
        "conv1d", 2 * B * S // 2 * H * 3 * H,
    ),
}  # fmt: skip
CUT: dict[str, Callable[[Mixer, Tensor], Tensor]] = {
    "a linear takes its own tokens of a gathered flip": lambda m, x: x.flip(1),
    "so does a product with a weight": lambda m, x: x.flip(1) @ m.square,
    "and a norm with a weight": lambda m, x: m.norm(x.flip(1)),
    "a convolution": lambda m, x: m.conv(x.transpose(1, 2)).transpose(1, 2),
    "a norm behind a cumsum": lambda m, x: nn.functional.layer_norm(x.cumsum(1), (H,)),
    "per-sample work": lambda m, x: m.norm(x.mean(1)) @ m.square,
    "the last token": lambda m, x: x[:, -1] @ m.square,
    "cos/sin tables": tables,
    "masks": lambda m, x: x * torch.ones(x.shape[1], x.shape[1]).tril().to(x).sum(1)[:, None],
}


def findings(model_fn: Callable[[], nn.Module], plan: Any, batch: dict[str, Any]) -> list[Any]:
    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> list[Any]:
        model(**local)
        return [f for f in seqcomp.of(model).report().findings if f.code == "SC402"]

    with exported_once(model_fn):
        first, *others = lockstep(model_fn, plan, step, inputs=batch)
    assert all(other == first for other in others)
    return first


@functools.cache
def mixer(mix: Callable[[Mixer, Tensor], Tensor]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Mixer(mix)

    return make


IDS = {"input_ids": torch.arange(B * S).view(B, S)}


@pytest.mark.parametrize(("plan", "axes", "data"), [
    ("ring_2", "ring", 1), ("usp_2x2", "ring+ulysses", 1), ("data_2+ring_2", "ring", 2),
])  # fmt: skip
@pytest.mark.parametrize("name", REPEATED)
def test_repeated_work_is_a_note_with_its_flops(name: str, plan: str, axes: str, data: int) -> None:
    mix, operation, flops = REPEATED[name]
    if name == "convolution of stride 2" and data > 1:  # without a rule: so is its batch
        axes, data = f"data+{axes}", 1
    (found,) = findings(mixer(mix), plan, IDS)
    assert found.severity == "note"
    assert found.where == "<root>"
    assert found.found.startswith(f"aten.{operation} on whole tokens")
    assert f"along {axes} computes the same {flops // data} FLOPs" in found.found
    assert f"of {B} x {S} tokens" in found.found


def test_attention_over_other_tokens_is_repeated() -> None:
    """Of a number that is not the length: the plan divides none of them."""

    def mix(model: Mixer, x: Tensor) -> Tensor:
        few = x[:, None, :6]
        return x + nn.functional.scaled_dot_product_attention(few, few, few).mean(2)

    (found,) = findings(mixer(mix), "ring_2", IDS)
    assert found.found.startswith("attention on whole tokens")
    assert f"along ring computes the same {4 * B * 6 * 6 * H} FLOPs" in found.found


def test_the_tensor_axis_repeats_too() -> None:
    """Compiled from a call of its own making, of 2 x 32 tokens: the note says so."""
    (found,) = findings(mixer(lambda m, x: decay(m, x.flip(1))), "ulysses_2+megatron_sp_2", IDS)
    assert f"4 ranks along ulysses+tensor computes the same {2 * B * 32 * 32 * H}" in found.found
    assert "of 2 x 32 tokens" in found.found


@pytest.mark.parametrize("plan", ["ring_2", "ulysses_2+megatron_sp_2", "data_2+ring_2"])
@pytest.mark.parametrize("name", CUT)
def test_what_is_cut_or_made_of_indices_is_none(name: str, plan: str) -> None:
    assert findings(mixer(CUT[name]), plan, IDS) == []


@pytest.mark.parametrize("plan", ["usp_2x2", "ring_2+megatron_sp_2"])
@pytest.mark.parametrize(
    "spec",
    [Spec(), Spec(positions="complex"), Spec(positions="learned"), Spec(qk_norm=True, tied=True),
     Spec(output="mean"), Spec(attention="module", kv_heads=4)],
    ids=["arange", "complex", "learned", "qk-norm", "pooled", "module"],
)  # fmt: skip
def test_ordinary_models_repeat_nothing(spec: Spec, plan: str) -> None:
    assert findings(functools.partial(build, spec), plan, inputs(spec)) == []


@pytest.mark.parametrize("family", ["llama", "phi3", "cohere"])
def test_models_of_transformers_repeat_nothing(family: str) -> None:
    pytest.importorskip("transformers")
    plan = "ring_2+megatron_sp_2"
    assert findings(lambda: build_family(family), plan, family_inputs()) == []


def test_kv_projections_beyond_the_kv_heads_are_repeated() -> None:
    """Each of 4 tensor ranks projects all tokens to both KV heads and takes the one it needs."""
    spec = Spec(layers=1)
    found = findings(lambda: build(spec), "megatron_sp_4", inputs(spec))
    assert [item.where for item in found] == ["layers.0.attn.k", "layers.0.attn.v"]
    assert all(f"{2 * 2 * 16 * 32 * 16} FLOPs" in item.found for item in found)
