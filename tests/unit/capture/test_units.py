"""What a module that runs as one unit is in a capture, and how its outputs are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.edit import op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.mixtures import is_experts
from seqcomp.capture.probes import Size
from seqcomp.capture.units import Unit
from seqcomp.diagnostics import PlanError
from tests.unit.capture.captured import capture_of


class Inner(nn.Module):
    """Runs `body` on [B, S, 6]; its parameter and buffer are there to be used."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 5, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(()))
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


class Outer(nn.Module):
    def __init__(self, body: Callable[..., Any], call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.inner = Inner(body)
        self.call = call or (lambda inner, x: inner(x))

    def forward(self, x: Tensor) -> Any:
        """x [B, S, 6]"""
        return self.call(self.inner, x.sin())


def captured(model: nn.Module) -> tuple[Capture, list[Unit]]:
    x = torch.ones(2, 8, 6, dtype=torch.float64)
    capture = capture_of(model, x, is_unit=lambda path: path == "inner")
    canonicalise(capture)
    nodes = [n for n in capture.graph.nodes if op_name(n) == "token_local"]
    assert [n.target for n in nodes] == capture.units.found
    return capture, capture.units.found


def by_value(self: Inner, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
    """What no capture holds: sizes and branches that depend on values."""
    flat = x.flatten(0, 1)
    out = flat.new_zeros(len(flat), 5)
    chosen = torch.where(flat[:, 0] > 0)[0].tolist()
    for row in chosen:
        out[row] = scale * flat[row] @ self.weight
    return {"flat": out, "kind": "routed", "x": x[..., :4], "index": (flat > 0).sum(-1)}


def test_it_is_one_operation_with_its_own_parameters_and_results() -> None:
    capture, (unit,) = captured(Outer(by_value, lambda inner, x: inner(x, scale=2.0)["flat"]))
    node = next(n for n in capture.graph.nodes if n.target is unit)
    assert [n.name in capture.parameters for n in node.args[1]] == [True]
    assert unit.names == ("weight",)
    assert unit.path == "inner"
    assert unit.marked
    flat, x, index = unit.outputs
    assert flat == (Size(12, 0, 0, 2), Size(5))
    assert index == (Size(12, 0, 0, 2),)
    assert [(size.start, size.stop) for size in x] == [(0, 1), (1, 2), (0, 0)]
    assert x[2] == Size(4)
    (result,) = node.users
    assert capture.shape(result) == (capture.batch * capture.length, 5)


def test_running_it_is_calling_the_module() -> None:
    model = Outer(by_value, lambda inner, x: inner(x, scale=2.0)["flat"])
    _, (unit,) = captured(model)
    x = torch.randn(1, 3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    results = unit.run(model, [x], [weight])
    want = torch.where(x.flatten(0, 1)[:, :1] > 0, 2.0 * x.flatten(0, 1) @ weight, 0.0)
    assert torch.allclose(results[0], want)
    results[0].sum().backward()
    assert weight.grad is not None
    assert model.inner.weight.grad is None
    assert torch.equal(model.inner.weight, torch.ones(6, 5, dtype=torch.float64))


def test_a_model_without_weights_is_probed_too() -> None:
    with torch.device("meta"):
        model = Outer(by_value, lambda inner, x: inner(x)["flat"])
    _, (unit,) = captured(model)
    assert unit.outputs[0][1] == Size(5)


def test_weights_may_be_more_than_the_machine_could_hold() -> None:
    """Of a large mixture's experts a few rows are read; they are 3 TiB here."""
    with torch.device("meta"):
        model = Outer(lambda self, x: x @ self.weight[:, :5])
        model.inner.weight = nn.Parameter(torch.empty(6, 1 << 36, dtype=torch.float64))
    _, (unit,) = captured(model)
    assert unit.outputs[0][-1] == Size(5)
    assert unit.kept is not None


def counted(self: Inner, x: Tensor) -> Tensor:
    self.count += 1
    return x * 2


def renewed(self: Inner, x: Tensor) -> Tensor:
    self.count = self.count + 1
    return x * 2


def squares(self: Inner, x: Tensor) -> Tensor:
    return x.new_zeros(x.shape[1] ** 2, 3)


def stripped(self: Inner, x: Tensor) -> Any:
    return x if x.shape[1] % 2 else (x, x)


REFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a buffer that it adds to": (counted, "SC307", "buffer count"),
    "a buffer that it replaces": (renewed, "SC307", "buffer count"),
    "arguments that it changes": (lambda self, x: x.mul_(2), "SC307", "arguments"),
    "random numbers": (lambda self, x: x + torch.rand_like(x), "SC308", "rand"),
    "dropout": (lambda self, x: nn.functional.dropout(x, 0.5), "SC308", "dropout"),
    "no tensor": (lambda self, x: 3, "SC313", "no tensor"),
    "an object": (lambda self, x: (x, object()), "SC313", "object"),
    "sizes that it was not given": (squares, "SC313", "rows for"),
    "another structure for other sizes": (stripped, "SC313", "how many tokens"),
    "a failure": (lambda self, x: x @ x, "SC313", "RuntimeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_could_not_share_is_refused(name: str) -> None:
    body, code, found = REFUSED[name]
    state = torch.get_rng_state()
    with pytest.raises(PlanError) as error:
        captured(Outer(body))
    (item,) = error.value.diagnostics
    assert item.code == code
    assert item.where == "inner"
    assert found in str(item.found)
    assert item.help
    assert torch.equal(torch.get_rng_state(), state)


def test_an_argument_that_is_no_tensor_or_constant_is_refused() -> None:
    with pytest.raises(PlanError, match="SC313"):
        captured(Outer(lambda self, x, n: x, lambda inner, x: inner(x, x.shape[1])))


def test_the_modules_are_as_they_were() -> None:
    model = Outer(by_value, lambda inner, x: inner(x)["flat"])
    captured(model)
    assert "forward" not in vars(model.inner)
    assert model.inner.count == 0


def test_known_experts() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    found = [path for path, module in model.named_modules() if is_experts(module)]
    assert found == ["model.layers.0.mlp.experts"]
    model.set_experts_implementation("batched_mm")
    assert not any(map(is_experts, model.modules()))
