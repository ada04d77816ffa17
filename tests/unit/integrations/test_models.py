"""Model specs: parsing, building on meta, and refusals."""

import json
from pathlib import Path

import pytest

from seqcomp.cost.named import load_shape
from seqcomp.diagnostics import PlanError
from seqcomp.integrations.models import build_model, parse_spec

TINY = (
    "hidden_size=32&intermediate_size=64&num_attention_heads=4&num_key_value_heads=2&vocab_size=97"
)


def refusal(spec: str) -> tuple[str, str]:
    with pytest.raises(PlanError) as caught:
        build_model(spec)
    (item,) = caught.value.diagnostics
    return item.code, str(item)


def test_options_are_json_or_text() -> None:
    spec = parse_spec("hf:A?n=2&x=1.5&t=true&f=False&s=silu&none=None&q=a%26b&l=[1,2]")
    assert spec.target == "A"
    assert spec.options == {
        "n": 2, "x": 1.5, "t": True, "f": False, "s": "silu", "none": None, "q": "a&b", "l": [1, 2],
    }  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    ["", "hf", "hf:", "x:y", "hf:A?b", "hf:A?=1", "hf:A?b=1&b=2", "titan:a", "titan:/b",
     "python:a", "python::b", "python:a:"],
)  # fmt: skip
def test_malformed_specs(spec: str) -> None:
    code, text = refusal(spec)
    assert code == "SC020"
    assert "hf:<Architecture>" in text


def test_a_known_model_is_the_spec_of_its_code() -> None:
    spec = parse_spec("llama3-70b")
    assert spec.target == "LlamaForCausalLM"
    shape = load_shape("llama3-70b")
    assert spec.options["hidden_size"] == shape.hidden
    assert spec.options["num_hidden_layers"] == shape.blocks[0].count
    assert spec.options["num_key_value_heads"] == shape.blocks[0].kv_heads
    assert spec.options["vocab_size"] == shape.vocab


def test_names_without_code_or_with_a_slip() -> None:
    assert "priced, not compiled" in refusal("gpt-22b")[1]
    assert "did you mean llama3-8b" in refusal("llama3-9b")[1]


def test_architecture_on_meta() -> None:
    pytest.importorskip("transformers")
    model = build_model(f"hf:LlamaForCausalLM?num_hidden_layers=3&{TINY}")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert len(model.model.layers) == 3
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.config.head_dim == 8


def test_config_file_with_changes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    settings = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4,
                "intermediate_size": 64, "num_hidden_layers": 5, "vocab_size": 97}  # fmt: skip
    path.write_text(
        json.dumps({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **settings})
    )
    model = build_model(f"hf:{path}")
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert len(model.model.layers) == 5
    assert len(build_model(f"hf:{path}?num_hidden_layers=2").model.layers) == 2
    assert len(build_model(f"hf:{tmp_path}").model.layers) == 5
    model.config.save_pretrained(tmp_path)
    saved = json.loads(path.read_text())
    assert len(saved["layer_types"]) == 5
    path.write_text(json.dumps({**saved, "architectures": ["Qwen2ForCausalLM"]}))
    for layers in (2, 5, 7):
        again = build_model(f"hf:{path}?num_hidden_layers={layers}")
        assert len(again.model.layers) == layers


def test_wrong_names_suggest_right_ones(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert "LlamaForCausalLM" in refusal("hf:LlamaForCausalLn")[1]
    assert refusal("hf:AutoTokenizer")[0] == "SC020"
    code, text = refusal("hf:LlamaForCausalLM?num_hidden_layer=2")
    assert (code, "did you mean num_hidden_layers" in text) == ("SC020", True)
    assert refusal("hf:org/not-a-file")[0] == "SC020"
    (tmp_path / "config.json").write_text("{}")
    assert refusal(f"hf:{tmp_path}/config.json")[0] == "SC020"
    assert refusal("hf:LlamaForCausalLM?hidden_size=text")[0] == "SC021"


def test_factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_factories.py").write_text(
        "import torch\n"
        "def linear(): return torch.nn.Linear(2, 3)\n"
        "def reads(): return torch.nn.Linear(2, int(torch.ones(1).item()) + 1)\n"
        "def wrong(): return 3\n"
        "def fails(): raise KeyError('lost')\n"
    )
    assert build_model("python:my_factories:linear").weight.is_meta
    assert not build_model("python:my_factories:reads").weight.is_meta
    for name, hint in (("wrong", "int"), ("fails", "KeyError"), ("missing", "AttributeError")):
        code, text = refusal(f"python:my_factories:{name}")
        assert code == "SC021"
        assert hint in text
    assert refusal("python:no_such_module_here:make")[0] == "SC021"


def test_on_a_device_weights_have_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    model = build_model(f"hf:LlamaForCausalLM?num_hidden_layers=1&{TINY}", device="cpu")
    assert all(p.device.type == "cpu" and p.std() > 0 for p in model.parameters() if p.ndim > 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_linear.py").write_text("import torch\ndef make(): return torch.nn.Linear(2, 3)")
    assert build_model("python:my_linear:make", device="cpu").weight.device.type == "cpu"
