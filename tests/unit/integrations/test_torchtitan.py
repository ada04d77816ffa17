"""``titan:<model>/<flavor>``: what is built, with which weights, and what is refused by name."""

from __future__ import annotations

import pytest
import torch

import seqcomp
from seqcomp.capture.facts import model_facts
from seqcomp.diagnostics import PlanError
from seqcomp.integrations import torchtitan
from seqcomp.integrations.models import build_model
from tests.fixtures.families import needs_torchtitan


def refusal(spec: str) -> tuple[str, str]:
    with pytest.raises(PlanError) as caught:
        build_model(spec)
    (item,) = caught.value.diagnostics
    return item.code, str(item)


def test_the_extra_is_named_where_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchtitan, "find_spec", lambda name: None)
    code, text = refusal("titan:llama3/debugmodel")
    assert code == "SC921"
    assert "pip install 'seqcomp[torchtitan]'" in text
    (found,) = seqcomp.validate("ring_2", "titan:llama3/debugmodel")
    assert found.code == "SC921"


@needs_torchtitan
def test_names() -> None:
    code, text = refusal("titan:lama3/8B")
    assert (code, "did you mean llama3" in text) == ("SC020", True)
    code, text = refusal("titan:llama3/debug")
    assert (code, "did you mean debugmodel" in text) == ("SC020", True)
    # Its windows and sinks would be dropped without a word by the SDPA module.
    code, text = refusal("titan:gpt_oss/debugmodel")
    assert (code, "llama3, qwen3" in text) == ("SC921", True)
    assert refusal("titan:qwen3/debugmodel_moe")[0] == "SC921"
    assert refusal("titan:../llama3/8B")[0] == "SC020"


@needs_torchtitan
@pytest.mark.parametrize(
    ("spec", "layers", "heads", "kv_heads"),
    [
        ("llama3/debugmodel", 6, 16, 16),
        ("llama3/1B", 16, 32, 8),
        ("qwen3/debugmodel", 8, 16, 8),
        ("qwen3/debugmodel_non_fused_qkv", 8, 16, 8),
    ],
)
def test_heads_and_masks_of_models_on_meta(
    spec: str, layers: int, heads: int, kv_heads: int
) -> None:
    model = build_model(f"titan:{spec}")
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    facts = model_facts(model)
    assert facts.layers == len(facts.attentions) == layers
    assert {(a.heads, a.kv_heads, a.mask) for a in facts.attentions} == {
        (heads, kv_heads, "causal")
    }


@needs_torchtitan
def test_validate() -> None:
    found = seqcomp.validate("ulysses_5", "titan:qwen3/debugmodel")
    assert [item.code for item in found] == ["SC201"]
    assert seqcomp.validate("ring_2+megatron_sp_4", "titan:llama3/debugmodel", seq_len=4096) == []


@needs_torchtitan
def test_weights_and_tables_have_their_values() -> None:
    """As torchtitan initialises them: what is left of `torch.empty` would be anything."""
    torch.manual_seed(0)
    model = build_model("titan:qwen3/debugmodel", device="cpu")
    for name, parameter in model.named_parameters():
        deviation = parameter.detach().std().item()
        assert deviation == (0 if "norm" in name else pytest.approx(0.02, rel=0.02)), name
        assert parameter.requires_grad
    names = len(list(model.named_parameters(remove_duplicate=False)))
    assert names == len(list(model.parameters())) + 1  # tied
    cache = model.get_buffer("layers.7.attention.rope.cache")
    assert torch.equal(cache[0], torch.tensor([1.0, 0.0]).repeat_interleave(128))
    torch.manual_seed(0)
    again = build_model("titan:qwen3/debugmodel", device="cpu")
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
