"""The compiled module is the user's own object: class, parameters, buffers, names, ties."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from tests.fixtures.compare import compare_grads, gradients_of, reference
from tests.fixtures.models import Decoder, Spec, build, inputs

ALONE = {"mesh": {"ring": 1}, "strategies": {"ring": {}}}
TABLES = Spec(positions="table", tied=True)


def compiled_model(spec: Spec = TABLES) -> tuple[Decoder, dict[str, Any]]:
    model = build(spec)
    before = {
        "class": type(model),
        "parameters": dict(model.named_parameters(remove_duplicate=False)),
        "buffers": dict(model.named_buffers()),
        "keys": list(model.state_dict()),
        "modules": {name: type(sub) for name, sub in model.named_modules()},
        "attributes": {name: set(vars(sub)) for name, sub in model.named_modules()},
    }
    model.layers[0].mlp.up.weight.requires_grad_(False)
    model.config = object()
    before["config"] = model.config
    assert seqcomp.parallelize(model, plan=ALONE) is model
    model(**inputs(spec))
    return model, before


def test_what_stays() -> None:
    model, before = compiled_model()
    assert type(model) is before["class"]
    assert model.config is before["config"]
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before["parameters"])
    assert all(after[name] is p for name, p in before["parameters"].items())
    assert model.head.weight is model.emb.weight
    assert not model.layers[0].mlp.up.weight.requires_grad
    buffers = dict(model.named_buffers())
    assert list(buffers) == list(before["buffers"])
    assert all(buffers[name] is b for name, b in before["buffers"].items())
    assert list(model.state_dict()) == before["keys"]
    assert {name: type(sub) for name, sub in model.named_modules()} == before["modules"]


def test_non_persistent_buffers_stay_so() -> None:
    model, before = compiled_model()
    assert set(before["buffers"]) - set(model.state_dict()), "the fixture has such a buffer"


def test_tied_weights_get_one_gradient() -> None:
    model, _ = compiled_model()
    model.requires_grad_(True)
    model.zero_grad()
    want = reference(lambda: build(TABLES), inputs(TABLES))
    model(**inputs(TABLES))["loss"].backward()
    distance, worst = compare_grads(want.gradients, gradients_of(model))
    assert distance <= 1, worst


def test_a_state_dict_round_trip() -> None:
    model, _ = compiled_model()
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    other = build(Spec(positions="table", tied=True, seed=3))
    seqcomp.parallelize(other, plan=ALONE)
    first = other(**inputs())["loss"].detach()
    other.load_state_dict(torch.load(stored))
    second = other(**inputs())["loss"].detach()
    torch.testing.assert_close(second, model(**inputs())["loss"].detach(), rtol=1e-12, atol=0)
    assert abs(float(first - second)) > 1e-3


def test_an_optimizer_step_is_seen() -> None:
    model, plain = compiled_model()[0], build(TABLES)
    plain.layers[0].mlp.up.weight.requires_grad_(False)
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(**inputs(TABLES))["loss"].backward()
            optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=name)


def test_close_gives_everything_back() -> None:
    model, before = compiled_model()
    seqcomp.of(model).close()
    attributes = {name: set(vars(sub)) for name, sub in model.named_modules()}
    attributes[""] -= {"config"}
    assert attributes == before["attributes"]
    out = model(**inputs(TABLES))
    torch.testing.assert_close(out["loss"], build(TABLES)(**inputs(TABLES))["loss"])
    with pytest.raises(seqcomp.PlanError) as caught:
        seqcomp.of(model)
    assert caught.value.diagnostics[0].code == "SC309"


def test_closing_twice_does_nothing() -> None:
    model, _ = compiled_model()
    compiled = seqcomp.of(model)
    compiled.close()
    compiled.close()


class Scaled(nn.Module):
    """A module whose instance has a forward of its own, as some wrappers set one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.inner.forward = self._doubled  # type: ignore[method-assign]

    def _doubled(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        out = Decoder.forward(self.inner, *args, **kwargs)
        return {**out, "loss": 2 * out["loss"]}

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return self.inner(input_ids, labels)


def test_a_forward_of_the_instance_is_kept() -> None:
    model = Scaled()
    want = model(**inputs())["loss"]
    own = model.inner.forward
    seqcomp.parallelize(model, plan=ALONE)
    torch.testing.assert_close(model(**inputs())["loss"], want)
    seqcomp.of(model).close()
    assert model.inner.forward == own
    torch.testing.assert_close(model(**inputs())["loss"], want)


def test_submodules_can_be_copied() -> None:
    """A deep copy of a compiled model's layer is an ordinary module."""
    model, _ = compiled_model()
    layer = copy.deepcopy(model.layers[1])
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    tables = model.positions(inputs()["input_ids"], None)
    torch.testing.assert_close(layer(x, tables), build(TABLES).layers[1](x, tables))
    assert layer.mlp.up.weight is not model.layers[1].mlp.up.weight
    mlp = pickle.loads(pickle.dumps(build(TABLES).layers[0].mlp))
    torch.testing.assert_close(mlp(x), model.layers[0].mlp(x))


def test_compiling_again_replaces() -> None:
    model, _ = compiled_model()
    first = seqcomp.of(model)
    seqcomp.parallelize(model, plan=ALONE)
    assert seqcomp.of(model) is not first
    model(**inputs(TABLES))
    seqcomp.of(model).close()
    torch.testing.assert_close(
        model(**inputs(TABLES))["loss"], build(TABLES)(**inputs(TABLES))["loss"]
    )
