"""The compiled program keeps the module tree: every module runs its own code, on local tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seqcomp
from seqcomp.lowering.scopes import ScopeBuilder
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import compare_grads, gradients_of, reference, value_distance
from tests.fixtures.models import build, default_dtype, inputs

PLAN = plans.usp(2, 2, "zigzag")


class Attend(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return y.transpose(1, 2).flatten(2)


class Deep(nn.Module):
    """Attention three modules down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Sequential(Attend(width), nn.Linear(width, width)), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(x)


class Pair(nn.Module):
    """Returns two values, of which both are used elsewhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Net(nn.Module):
    width = 32

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x)
        return {"logits": y, "loss": y.square().mean()}

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Nested(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Deep(self.width) for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Twice(Net):
    """One block called twice: its weights are shared by both calls."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = Deep(self.width), nn.LayerNorm(self.width)

    def body(self, x: Tensor) -> Tensor:
        return self.norm(self.block(self.norm(self.block(x))))


class SameObject(Net):
    """One module object under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Deep(self.width)
        self.second = self.first

    def body(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Across(Net):
    """Values that a later module uses, past others."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.attend = Pair(self.width), Attend(self.width)
        self.gate = nn.Linear(self.width, self.width)

    def body(self, x: Tensor) -> Tensor:
        left, right = self.pair(x)
        y = self.attend(left * right)
        return self.gate(y + left) * right


class Inside(Net):
    """A weight of a child used by its parent, and a child called in the middle of another's use."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.scale = Attend(self.width), nn.Linear(self.width, self.width, bias=False)

    def body(self, x: Tensor) -> Tensor:
        y = self.attend(x @ self.scale.weight)
        return self.scale(y) + self.scale.weight.sum()


class Borrows(nn.Module):
    """Calls a module that is not one of its own children."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own = nn.Linear(width, width)

    def forward(self, x: Tensor, borrowed: nn.Module) -> Tensor:
        return self.own(borrowed(self.own(x)).tanh())


class Lent(Net):
    """A module that is called below another's call, and on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.borrows = Attend(self.width), Borrows(self.width)
        self.lent = nn.Sequential(nn.Linear(self.width, self.width), nn.SiLU())

    def body(self, x: Tensor) -> Tensor:
        return self.lent(self.borrows(self.attend(x), self.lent))


NETS = [Nested, Twice, SameObject, Across, Inside, Lent]


def make(kind: type[Net]) -> Net:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        return kind()


def example(batch: int = 2, length: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(batch, length, Net.width, generator=generator, dtype=torch.float64)}


@pytest.mark.parametrize("kind", NETS)
def test_parity(kind: type[Net]) -> None:
    want = reference(lambda: make(kind), example())

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> None:
        out = model(**local)
        out["loss"].backward()
        assert value_distance(want.loss, out["loss"]) <= 1
        assert value_distance(want.logits, out["logits"]) <= 1
        distance, worst = compare_grads(want.gradients, gradients_of(model))
        assert distance <= 1, worst

    lockstep(lambda: make(kind), PLAN, step, inputs=example())


@pytest.mark.parametrize("kind", [kind for kind in NETS if kind is not Lent])
def test_modules_are_called_as_often_as_before(kind: type[Net]) -> None:
    """Hooks registered after the compilation see every call: wrappers of blocks work."""

    def calls(model: nn.Module, batch: dict[str, Tensor]) -> Counter[str]:
        seen: Counter[str] = Counter()
        hooks = [
            sub.register_forward_hook(lambda *_, name=name: seen.update([name]))
            for name, sub in model.named_modules()
            if name and next(sub.parameters(), None) is not None
        ]
        model(**batch)
        for hook in hooks:
            hook.remove()
        return seen

    expected = calls(make(kind), example())

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Counter[str]:
        model(**local)
        return calls(model, local)

    assert lockstep(lambda: make(kind), PLAN, step, inputs=example())[0] == expected


def test_the_code_of_a_module_can_be_read() -> None:
    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> dict[str, str]:
        model(**local)
        compiled = seqcomp.of(model)
        with pytest.raises(seqcomp.PlanError, match=r"layers\.7"):
            compiled.graph("layers.7")
        paths = ("", "layers.0", "layers.0.attn", "layers.1.mlp")
        return {path: compiled.graph(path) for path in paths}

    code = lockstep(build, PLAN, step, inputs=inputs())[0]
    for text in code.values():
        compile(text, "<graph>", "exec")
        assert "def forward(self" in text
    assert "self.attn" in code["layers.0"]
    assert "self.mlp" in code["layers.0"]
    assert "attention(" in code["layers.0.attn"]
    assert "silu" in code["layers.1.mlp"]
    assert "all_gather" in code[""]
    assert "all_gather" not in code["layers.0"]


def test_original_submodules_still_work() -> None:
    """A submodule called by its owner, outside the compiled model, runs its own forward."""
    want = make(Across)

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> None:
        model(**local)
        torch.testing.assert_close(model.attend(local["x"]), want.attend(local["x"]))
        left, right = model.pair(local["x"])
        torch.testing.assert_close(left * right, torch.mul(*want.pair(local["x"])))

    lockstep(lambda: make(Across), PLAN, step, inputs=example())


def test_a_knot_of_modules_is_undone_and_what_is_below_them_stays() -> None:
    """`a` before and after `b`, with a child in its second half."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    value = x
    for modules in (("a",), ("b",), ("a", "a.child"), ()):
        value = graph.call_function(torch.sin, (value,))
        value.meta["nn_module_stack"] = {name: (name, nn.Module) for name in modules}
    graph.output((value,))
    builder = ScopeBuilder(graph, {}, {}, "test")
    root = builder.build([x])
    assert {piece.path for piece in builder.pieces} == {"", "a.child"}
    assert "self.a.child(" in root.code
