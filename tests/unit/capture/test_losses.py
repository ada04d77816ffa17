"""Losses are rewritten into others of the same value and gradient, or left alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.edit import argument, op_name
from seqcomp.capture.export import Capture
from tests.unit.capture.captured import capture_of, node_of, ops_of, run

B, S, V, D = 2, 6, 7, 5
LossFn = Callable[[Any, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """hidden [B, S, D], labels [B, S] -> the loss of each idiom."""

    def __init__(self, *losses: LossFn):
        super().__init__()
        self.losses = losses
        self.head = nn.Linear(D, V)
        self.norm = nn.RMSNorm(D)
        self.register_buffer("weight", torch.linspace(0.2, 1.7, V), persistent=False)

    def forward(self, x: Tensor, labels: Tensor) -> list[Tensor]:
        return [loss(self, x, labels) for loss in self.losses]


def flat(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **kwargs)


def threes(labels: Tensor) -> Tensor:
    """Labels in which class 3 stands for no label."""
    return labels.masked_fill(labels < 0, 3)


def classes_first(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, **kwargs)


# The slice of the activations goes away.
MOVED: dict[str, LossFn] = {
    "shift by 1": lambda m, x, y: flat(m.head(x)[:, :-1], y[:, 1:]),
    "shift by 2": lambda m, x, y: flat(m.head(x)[:, :-2], y[:, 2:]),
    "from the left": lambda m, x, y: flat(m.head(x)[:, 1:], y[:, 1:]),
    "both sides": lambda m, x, y: flat(m.head(x)[:, 1:-1], y[:, 2:]),
    "hidden states cut": lambda m, x, y: flat(m.head(x[:, :-1]), y[:, 1:]),
    "hidden states cut, then norm": lambda m, x, y: flat(m.head(m.norm(x[:, :-1])), y[:, 1:]),
    "contiguous": lambda m, x, y: F.cross_entropy(
        m.head(x)[:, :-1].contiguous().view(-1, V), y[:, 1:].contiguous().view(-1)
    ),
    "float": lambda m, x, y: flat(m.head(x).float()[..., :-1, :].float(), y[..., 1:]),
    "soft cap": lambda m, x, y: flat(torch.tanh(m.head(x)[:, :-1] / 3.0) * 3.0, y[:, 1:]),
    "labels of the same positions": lambda m, x, y: flat(m.head(x)[:, :-1], y[:, :-1]),
    "labels flat before": lambda m, x, y: flat(m.head(x)[:, :-1], y[:, 1:].flatten().clone()),
    "sum": lambda m, x, y: flat(m.head(x)[:, :-1], y[:, 1:], reduction="sum"),
    "weights": lambda m, x, y: flat(m.head(x)[:, :-1], y[:, 1:], weight=m.weight),
    "weights, sum": lambda m, x, y: flat(
        m.head(x)[:, :-1], y[:, 1:], weight=m.weight, reduction="sum"
    ),
    "smoothing": lambda m, x, y: flat(m.head(x)[:, :-1], y[:, 1:], label_smoothing=0.1),
    "ignore 3": lambda m, x, y: flat(m.head(x)[:, :-1], threes(y)[:, 1:], ignore_index=3),
    "ignore 3, weights, smoothing": lambda m, x, y: flat(
        m.head(x)[:, :-1], threes(y)[:, 1:], ignore_index=3, weight=m.weight, label_smoothing=0.2
    ),
    "nll": lambda m, x, y: F.nll_loss(
        F.log_softmax(m.head(x), -1)[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1)
    ),
    "flattened first": lambda m, x, y: F.cross_entropy(
        m.head(x).view(-1, V)[:-1], y.view(-1)[1:]
    ),
    "narrow labels": lambda m, x, y: F.cross_entropy(
        m.head(x)[:, :-1].reshape(-1, V), y.int()[:, 1:].reshape(-1).long()
    ),
}  # fmt: skip

# Exact as they are; where a slice stays, the placement gathers it.
KEPT: dict[str, LossFn] = {
    "classes first": lambda m, x, y: classes_first(m.head(x)[:, :-1], y[:, 1:]),
    "classes first, cut late": lambda m, x, y: F.cross_entropy(
        m.head(x).transpose(1, 2)[:, :, :-1], y[:, 1:]
    ),
    "none": lambda m, x, y: flat(m.head(x)[:, :-1], y[:, 1:], reduction="none").sum() / y.numel(),
    "softmax over the sequence first": lambda m, x, y: flat(
        m.head(x)[:, :-1].softmax(1), y[:, 1:]
    ),
    "logits mixed after the cut": lambda m, x, y: flat(m.head(x)[:, :-1].cumsum(1), y[:, 1:]),
    "flipped after the cut": lambda m, x, y: flat(m.head(x)[:, :-1].flip(1), y[:, 1:]),
    "last tokens": lambda m, x, y: flat(m.head(x)[:, -4:], y[:, -4:]),
    "every second": lambda m, x, y: flat(m.head(x)[:, ::2], y[:, ::2]),
    "logits also used whole": lambda m, x, y: (
        flat((h := m.head(x))[:, :-1], y[:, 1:]) + h.square().mean()
    ),
    "cut logits also used": lambda m, x, y: (
        flat(c := m.head(x)[:, :-1].contiguous(), y[:, 1:]) + c.square().mean()
    ),
    "tokens as classes": lambda m, x, y: F.cross_entropy(
        (x @ x.transpose(1, 2))[:, :, :-1][:, :-1], y[:, 1:].clamp(0, S - 2)
    ),
    "tokens as classes 2": lambda m, x, y: F.cross_entropy(
        (x @ x.transpose(1, 2))[:, :-1, :-1], y[:, 1:].clamp(0, S - 2)
    ),
    "probabilities": lambda m, x, y: flat_probabilities(m.head(x)[:, :-1], m.head(x)[:, 1:]),
    "transposed tokens": lambda m, x, y: flat(
        m.head(x)[:, :-1].transpose(0, 1), y[:, 1:].t()
    ),
    "no shift": lambda m, x, y: flat(m.head(x), y),
    "no shift, classes first": lambda m, x, y: classes_first(m.head(x), y),
    "no shift, weights": lambda m, x, y: classes_first(m.head(x), y, weight=m.weight),
    "two losses": lambda m, x, y: (
        flat((h := m.head(x))[:, :-1], y[:, 1:]) + 0.3 * flat(h[:, :-2], y[:, 2:])
    ),
    "one token": lambda m, x, y: F.cross_entropy(m.head(x)[:, 0], y[:, 0]),
    "log probabilities": lambda m, x, y: F.nll_loss(
        F.log_softmax(m.head(x), -1).transpose(1, 2), y, weight=m.weight
    ),
}  # fmt: skip


def flat_probabilities(logits: Tensor, others: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, V), others.softmax(-1).reshape(-1, V))


def example(ignored: float = 0.3, length: int = S) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, length, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (B, length), generator=generator)
    labels[torch.rand(B, length, generator=generator) < ignored] = -100
    return x, labels


def rewritten(module: nn.Module, *args: Tensor) -> Capture:
    capture = capture_of(module, *args)
    canonicalise(capture)
    return capture


def values(compute: Callable[..., Any], module: nn.Module, x: Tensor, y: Tensor) -> Any:
    """Per loss: its value, the gradient of x and those of the parameters."""
    leaf = x.clone().requires_grad_()
    wanted = [leaf, *module.parameters()]
    return [
        (loss.detach(), *torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True))
        for loss in compute(leaf, y)
    ]


def check_equal(capture: Capture, module: nn.Module, x: Tensor, y: Tensor) -> None:
    expected = values(module, module, x, y)
    found = values(lambda *a: run(capture, module, *a), module, x, y)
    torch.testing.assert_close(found, expected, equal_nan=True)


def model_of(*losses: LossFn) -> Model:
    torch.manual_seed(1)
    return Model(*losses).double()


@functools.cache
def captured(group: str) -> tuple[Model, Capture]:
    """All idioms of a group in one capture."""
    module = model_of(*GROUPS[group].values())
    return module, rewritten(module, *example())


@functools.cache
def both(group: str, ignored: float, length: int) -> dict[str, tuple[Any, Any]]:
    module, capture = captured(group)
    args = example(ignored, length)
    expected = values(module, module, *args)
    found = values(lambda *a: run(capture, module, *a), module, *args)
    return dict(zip(GROUPS[group], zip(found, expected, strict=True), strict=True))


GROUPS = {"moved": MOVED, "kept": KEPT}


@pytest.mark.parametrize(("ignored", "length"), [(0.3, S), (0.3, 9), (2.0, S), (0.0, 12)])
@pytest.mark.parametrize(("group", "name"), [(g, n) for g in GROUPS for n in GROUPS[g]])
def test_value_and_gradients_stay(group: str, name: str, ignored: float, length: int) -> None:
    """`ignored` 2 leaves no label at all: a mean over nothing is NaN."""
    found, expected = both(group, ignored, length)[name]
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_shifts_leave_no_slice_of_an_activation() -> None:
    _, capture = captured("moved")
    left = [n for n in capture.graph.nodes if op_name(n) == "aten.slice"]
    assert not [n for n in left if n.meta["val"].is_floating_point()]


@pytest.mark.parametrize("name", ["shift by 2", "both sides"])
def test_the_shortest_sequence(name: str) -> None:
    module = model_of(MOVED[name])
    capture = rewritten(module, *example())
    check_equal(capture, module, *example(ignored=0.0, length=3))


@pytest.mark.parametrize("name", ["no shift", "shift by 1", "weights", "no shift, classes first"])
def test_a_mean_becomes_sum_over_count(name: str) -> None:
    capture = rewritten(model_of({**MOVED, **KEPT}[name]), *example())
    loss = node_of(capture, "aten.cross_entropy_loss")
    assert argument(loss, 3, "reduction", 1) in (0, 2)
    assert "aten.sum" in ops_of(capture)


def test_the_count_needs_no_activation() -> None:
    capture = rewritten(model_of(MOVED["shift by 1"]), *example())
    loss = node_of(capture, "aten.cross_entropy_loss")
    labels = loss.args[1]
    (ratio,) = capture.graph.output_node().all_input_nodes
    seen, pending = set(), [ratio.args[1]]
    while pending:
        node = pending.pop()
        seen.add(node)
        pending += [n for n in node.all_input_nodes if n not in seen]
    assert labels in seen
    assert not any(n.op == "placeholder" and n.name in capture.parameters for n in seen)


@pytest.mark.parametrize("ignore", [-1, 3, 255, -100])
def test_weights_with_any_ignored_class(ignore: int) -> None:
    module = model_of(
        lambda m, x, y: classes_first(m.head(x), y, weight=m.weight, ignore_index=ignore)
    )
    x, y = example(ignored=0.0)
    y[0, :3] = ignore
    check_equal(rewritten(module, x, y), module, x, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_in_half_precision_is_summed_in_single(dtype: torch.dtype) -> None:
    """4099 tokens of loss 30: the mean fits in float16, its sum does not."""

    class Half(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(x.view(-1, x.shape[-1]), labels.view(-1))

    x = torch.zeros(1, 4099, 4, dtype=dtype)
    x[..., 0] = 30.0
    labels = torch.ones(1, 4099, dtype=torch.long)
    module = Half()
    found = run(rewritten(module, x, labels), module, x, labels)
    assert found.dtype == dtype
    assert found.item() == module(x.float(), labels).to(dtype).item()
