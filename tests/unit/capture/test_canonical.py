"""Canonical graphs compute what the module computes, or the module is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.export import Capture
from seqcomp.diagnostics import PlanError
from tests.unit.capture.captured import Calls, capture_of, ops_of, run

B, S, D = 2, 6, 4
Body = Callable[[Any, Tensor], Any]


def canonical(module: nn.Module, *args: Tensor) -> Capture:
    capture = capture_of(module, *args)
    canonicalise(capture)
    return capture


def outcome(compute: Callable[[Tensor], Any], module: nn.Module, x: Tensor) -> list[Any]:
    """Results, gradient of the input and of the parameters."""
    leaf = x.clone().requires_grad_()
    result = compute(leaf)
    results = list(result) if isinstance(result, tuple | list) else [result]
    wanted = [leaf, *module.parameters()]
    differentiable = [r.sin().sum() for r in results if r.requires_grad]
    grads: list[Any] = []
    if differentiable:
        total = torch.stack(differentiable).sum()
        grads = list(torch.autograd.grad(total, wanted, allow_unused=True))
    return [*[r.detach() for r in results], *grads]


def check(module: nn.Module, lengths: tuple[int, ...] = (S, 9)) -> Capture:
    generator = torch.Generator().manual_seed(0)
    capture = canonical(module, torch.randn(B, S, D, requires_grad=True))
    for length in lengths:
        x = torch.randn(B, length, D, generator=generator, dtype=torch.float32)
        expected = outcome(module, module, x)
        found = outcome(lambda leaf: run(capture, module, leaf), module, x)
        torch.testing.assert_close(found, expected)
        for own, want in zip(found, expected, strict=True):
            assert (own is None) == (want is None)
            if want is not None:
                assert own.dtype == want.dtype
    return capture


def assigned(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    h[:, 0] = 1.0
    return h


def chained(m: Any, x: Tensor) -> Tensor:
    h = x.sin()
    h += 1
    h *= x
    return h.add_(h).relu_()


def earlier_use(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.sin()
    before = h + 1
    h.mul_(3.0)
    return before, h


def result_of_in_place(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.sin()
    k = h.mul_(3.0)
    k.add_(1.0)
    return h + 0, k + x


def half_in_place(m: Any, x: Tensor) -> Tensor:
    h = x.to(torch.bfloat16) * 1
    h += x
    return h


def view_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    rows = h.view(-1, D)
    rows.add_(1.0)
    return h


def write_then_view(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    rows = h.transpose(1, 2)
    h.add_(1.0)
    return rows * 2


def chunk_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    left, _ = h.chunk(2, -1)
    left.add_(1.0)
    return h


def write_below_chunks(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    left, right = h.chunk(2, -1)
    h.add_(1.0)
    return left * right


def split_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    parts = h.split([1, D - 1], -1)
    parts[1].zero_()
    return h


def unbind_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.unbind(-1)[0].zero_()
    return h


def same_dtype_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.to(x.dtype).add_(1.0)
    return h


def contiguous_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.contiguous().add_(1.0)
    return h


def dropout_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    F.dropout(h, 0.5, training=False).add_(1.0)
    return h


def broadcast_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    same, _ = torch.broadcast_tensors(h, x)
    same.add_(1.0)
    return h


def atleast_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    torch.atleast_2d(h).add_(1.0)
    return h


def diagonal_written(m: Any, x: Tensor) -> Tensor:
    h = x @ x.mT
    h.diagonal(dim1=1, dim2=2).zero_()
    return h


def input_written(m: Any, x: Tensor) -> Tensor:
    x = x.detach()
    x.add_(1.0)
    return x * 2


def copied(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    h.copy_(x * 2)
    return h + 1


def filled(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.fill_(3.0)
    return h * x


def written_by_index(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.index_put_((torch.tensor([0]),), torch.tensor(0.5))
    return h


def view_alone(m: Any, x: Tensor) -> Tensor:
    rows = torch.bmm(x, x.mT).unsqueeze(1).squeeze(1)
    rows.add_(x.sum(-1, keepdim=True))
    return rows @ x


def best_normalised(m: Any, x: Tensor) -> Tensor:
    best, at = x.exp().topk(2, dim=-1)
    best /= best.sum(-1, keepdim=True)
    return best + at


def filled_by_parts(m: Any, x: Tensor) -> Tensor:
    h = x.new_empty(*x.shape[:-1], D + 3)
    h[..., :D] = x * 2
    h[..., D:].copy_(x[..., :1].sin())
    return h.cos()


def shifted_right(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape)
    h[:, 1:] = x[:, :-1].clone()
    h[:, 0] = 0.5
    return h.masked_fill_(h > 1, -1.0) * x


def part_of_a_part(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    before = h + 1
    row = h[:, 2]
    row[:, 1:3].mul_(3.0)
    return before, h + row.sum()


def written_after_it_was_copied(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h, k = x * 2, torch.zeros_like(x)
    k.copy_(h)
    k.add_(1.0)
    return h * 3, k


def part_read_later(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    rows = h.transpose(1, 2)
    h[:, 0] = 0.0
    return rows * 2


# Written in place where nothing else sees it: plain operations of the same value.
IN_PLACE: dict[str, Body] = {
    "add_": lambda m, x: (x * 2).add_(1.0),
    "masked_fill_": lambda m, x: (x * 2).masked_fill_(x > 0, -1.0),
    "relu in place": lambda m, x: F.relu(x * 2, inplace=True),
    "chained": chained,
    "used before": earlier_use,
    "result of an in-place operation": result_of_in_place,
    "copied": copied,
    "filled": filled,
    "by index": written_by_index,
    "narrower than its operand": half_in_place,
    "through the one view": view_alone,
    "one of several results": best_normalised,
    "filled by parts": filled_by_parts,
    "shifted right": shifted_right,
    "a part of a part": part_of_a_part,
    "written after it was copied": written_after_it_was_copied,
}
# Written through or below an alias. Right or refused; never something else.
ALIASED: dict[str, Body] = {
    "an assigned slice": assigned,
    "a part read later": part_read_later,
    "a view is written": view_then_write,
    "viewed before": write_then_view,
    "a chunk is written": chunk_then_write,
    "below chunks": write_below_chunks,
    "a split part": split_then_write,
    "an unbound row": unbind_then_write,
    "to the same dtype": same_dtype_then_write,
    "contiguous": contiguous_then_write,
    "dropout that is off": dropout_then_write,
    "broadcast": broadcast_then_write,
    "atleast_2d": atleast_then_write,
    "a diagonal": diagonal_written,
    "the input": input_written,
}


# The graph has them as writes to a part, or to the one name of a value.
EXACT = ("contiguous", "atleast_2d", "to the same dtype", "an assigned slice")


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operations_become_plain(name: str) -> None:
    capture = check(Calls(IN_PLACE[name]))
    for node in capture.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable


@pytest.mark.parametrize("name", ALIASED)
def test_writes_through_an_alias_are_exact_or_refused(name: str) -> None:
    module, x = Calls(ALIASED[name]), torch.randn(B, S, D)
    try:
        capture = canonical(module, x)
    except PlanError as error:
        codes = {d.code for d in error.diagnostics}
        if codes != {"SC307"}:
            raise
        return
    assert name in EXACT, "an alias in the graph"
    torch.testing.assert_close(run(capture, module, x), module(x))


class Scaled(nn.Module):
    """Regions without gradient around some of the work."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, D))

    def forward(self, x: Tensor) -> Any:
        if self.kind == "no_grad":
            with torch.no_grad():
                frozen = x * self.weight
            return frozen * x * self.weight
        if self.kind == "several":
            with torch.no_grad():
                low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
                steps = (x > low).sum(-1)
            return (x - low) / (high - low + 1) * self.weight, steps
        if self.kind == "nested":
            with torch.no_grad():
                frozen = x * self.weight
                with torch.enable_grad():
                    live = x.sin() * self.weight
            return frozen * live
        if self.kind == "around":
            with torch.set_grad_enabled(False):
                frozen = (x @ x.mT).softmax(-1)
            return frozen @ (x * self.weight)
        assert self.kind == "detach"
        return x.detach() * x * self.weight


@pytest.mark.parametrize("kind", ["no_grad", "several", "around", "detach"])
def test_gradients_stop_where_they_stop(kind: str) -> None:
    capture = check(Scaled(kind))
    assert "wrap_with_set_grad_enabled" not in ops_of(capture)


def test_a_region_with_gradient_inside_of_one_without_is_exact_or_refused() -> None:
    try:
        check(Scaled("nested"))
    except PlanError:
        return


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: x.to(x.dtype) + 1,
        lambda m, x: x[:, :, :] + 1,
        lambda m, x: x[:, : x.shape[1]].expand(-1, -1, -1) + 1,
        lambda m, x: F.dropout(x, 0.5, training=False) + 1,
        lambda m, x: F.dropout(x, 0.0, training=True) + 1,
        lambda m, x: F.dropout(x + 1, 0.5, training=False, inplace=True),
        lambda m, x: F.dropout1d(x, 0.5, training=False) + 1,
    ],
)
def test_identities_go(body: Body) -> None:
    assert [op for op in ops_of(check(Calls(body))) if op != "aten.sym_size"] == ["aten.add"]


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: x[:, :-1] + 1,
        lambda m, x: x.to(torch.float64) + 1,
        lambda m, x: x[:, :1].expand(-1, x.shape[1], -1) + 1,
        lambda m, x: x[1:, :, :] + 1,
    ],
)
def test_what_changes_something_stays(body: Body) -> None:
    kept = [op for op in ops_of(check(Calls(body))) if op not in ("aten.sym_size", "aten.add")]
    assert kept


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (lambda m, x: F.dropout(x, 0.1), "SC913"),
        (lambda m, x: F.dropout(x + 1, 0.1, inplace=True), "SC913"),
        (lambda m, x: F.dropout1d(x, 0.1), "SC913"),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), "SC304"),
        (lambda m, x: x + torch.rand_like(x), "SC308"),
        (lambda m, x: x + torch.randn(x.shape[-1]), "SC308"),
        (lambda m, x: torch.bernoulli(x.sigmoid()), "SC308"),
        (lambda m, x: F.alpha_dropout(x, 0.1, training=True), "SC308"),
        (lambda m, x: x[:, torch.randperm(D)[0]], "SC308"),
        (lambda m, x: F.gumbel_softmax(x), "SC307|SC308"),
        (lambda m, x: (x * 0).normal_() + x, "SC307|SC308"),
    ],
)
def test_random_numbers_are_refused_by_code(body: Body, code: str) -> None:
    with pytest.raises(PlanError) as caught:
        canonical(Calls(body), torch.randn(B, S, D))
    assert {d.code for d in caught.value.diagnostics} <= set(code.split("|"))


def test_attention_without_dropout_is_not_random() -> None:
    body = lambda m, x: F.scaled_dot_product_attention(x, x, x)  # noqa: E731
    canonical(Calls(body), torch.randn(B, S, D))


class Counts(nn.Module):
    """Keeps state in a buffer."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.register_buffer("seen", torch.zeros(D))
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "add_":
            self.seen.add_(x.detach().sum((0, 1)))
        elif self.kind == "assigned":
            self.seen = self.seen + x.detach().sum((0, 1))
        elif self.kind == "batch norm":
            return self.norm(x.mT)
        elif self.kind == "slice":
            self.seen[:2] = x.detach()[0, 0, :2]
        return x * self.seen


@pytest.mark.parametrize("kind", ["add_", "assigned", "batch norm", "slice"])
def test_state_that_changes_is_refused(kind: str) -> None:
    with pytest.raises(PlanError) as caught:
        canonical(Counts(kind).train(), torch.randn(B, S, D))
    assert {d.code for d in caught.value.diagnostics} <= {"SC307", "SC301"}


def test_batch_norm_in_eval_mode_only_reads() -> None:
    module = Counts("batch norm").eval()
    check(module)


def test_assertions_become_facts() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        torch._check(x.shape[1] % 3 == 0)
        return x.view(x.shape[0], -1, 3, D).sum(2)

    capture = canonical(Calls(body), torch.randn(B, S, D))
    assert not [op for op in ops_of(capture) if "assert" in op]
    assert capture.accepts(B, 9)
    assert not capture.accepts(B, 8)


def test_values_that_decide_sizes_are_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return x[:, :, : int((x > 0).any().item()) + 1]

    with pytest.raises(PlanError):
        canonical(Calls(body), torch.randn(B, S, D))
