"""Weights that are not one linear for each of q, k, v, gate and up, as model families have them.

* interleaved (GPT-NeoX): q, k, v of a head side by side; a cut by rows is a cut by heads;
* Conv1D (GPT2): [in, out], so that columns are its last dim;
* fused (Phi3, GPT2's c_attn, nn.MultiheadAttention): [q | k | v], whole and sliced where used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.runtime.comm import RankContext
from seqcomp.strategies.base import AttentionShape
from seqcomp.strategies.megatron_sp import MegatronSp
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import FP64, compare_grads, field_of, reference, value_distance
from tests.fixtures.exports import exported_once
from tests.fixtures.families import LENGTH, VOCAB, build_family, family_inputs, tolerance_of
from tests.fixtures.lockstep import counted, reported, whole_gradients
from tests.fixtures.models import default_dtype, initialise
from tests.fixtures.parity import data_slice, slice_batch
from tests.fixtures.work import Work, work_of

ALONE: plans.Plan = {"mesh": {"ring": 1}, "strategies": {"ring": {}}}
HIDDEN, LAYERS, TOKENS = 32, 2, 2 * LENGTH
KINDS = ("gpt_neox", "gpt2", "phi3")
NEOX, GPT2, PHI3 = "gpt_neox.layers.0.", "transformer.h.0.", "model.layers.0."


@pytest.mark.parametrize(
    ("family", "plan"),
    plans.in_turn(
        [*KINDS, "encoder", *KINDS, "encoder"],
        [
            plans.megatron(4),
            plans.with_tensor(plans.ulysses(2), 2),
            plans.with_data(plans.megatron(2), 2),
        ],
    ),
    ids=lambda x: plans.name(x) if isinstance(x, dict) else x,
)
def test_parity(family: str, plan: plans.Plan) -> None:
    """Alone on 2 ranks and in a ring: test_families."""
    tolerance, batch = tolerance_of(family), family_inputs()
    want = reference(lambda: build_family(family), batch)

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        context.traffic.reset()
        out = model(**local)
        loss, logits = field_of(out, "loss"), field_of(out, "logits")
        assert loss is not None
        loss.backward()
        traffic = counted(context)
        part, parts = data_slice(plan, context.rank)
        return (
            value_distance(want.loss, loss, tolerance),
            value_distance(slice_batch(want.logits, part, parts), logits, tolerance),
            compare_grads(want.gradients, whole_gradients(model, context), tolerance),
            traffic == reported(seqcomp.of(model).report()),
        )

    with exported_once(family):
        ranks = lockstep(lambda: build_family(family), plan, step, inputs=batch)
    for rank, (loss, logits, (gradient, worst), said) in enumerate(ranks):
        assert loss <= 1, rank
        assert logits <= 1, rank
        assert gradient <= 1, (rank, worst)
        assert said, rank


def seen(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
    """(work, local shapes, traffic, findings) of one step."""

    def step() -> Tensor:
        loss: Tensor = model(**local)["loss"]
        return loss

    step()
    context.traffic.reset()
    work = work_of(model, VOCAB, step)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = [(f.code, f.where) for f in seqcomp.of(model).report().findings]
    return work, shapes, counted(context), found


OnRanks = Callable[[str, int], list[Any]]


@pytest.fixture(scope="module")
def on_ranks() -> OnRanks:
    """Each family on each degree once; degree 1 is one process."""
    known: dict[tuple[str, int], list[Any]] = {}

    def run(family: str, degree: int) -> list[Any]:
        key = (family, degree)
        if key not in known:
            plan = plans.megatron(degree) if degree > 1 else ALONE
            with exported_once(family):
                known[key] = lockstep(
                    lambda: build_family(family), plan, seen, inputs=family_inputs()
                )
        return known[key]

    return run


@pytest.mark.parametrize(
    ("family", "whole", "cut"),
    [
        (
            "gpt_neox",
            (),
            {
                NEOX + "attention.query_key_value.weight": 0,
                NEOX + "attention.query_key_value.bias": 0,
                NEOX + "attention.dense.weight": 1,
                NEOX + "mlp.dense_h_to_4h.weight": 0,
                NEOX + "mlp.dense_h_to_4h.bias": 0,
                NEOX + "mlp.dense_4h_to_h.weight": 1,
                "gpt_neox.embed_in.weight": 0,
                "lm_head.weight": 0,
            },
        ),
        (
            "gpt2",
            (GPT2 + "attn.c_attn.weight", GPT2 + "attn.c_attn.bias"),
            {
                GPT2 + "attn.c_proj.weight": 0,
                GPT2 + "mlp.c_fc.weight": 1,
                GPT2 + "mlp.c_fc.bias": 0,
                GPT2 + "mlp.c_proj.weight": 0,
                "transformer.wte.weight": 0,
            },
        ),
        (
            "phi3",
            (PHI3 + "self_attn.qkv_proj.weight", PHI3 + "mlp.gate_up_proj.weight"),
            {
                PHI3 + "self_attn.o_proj.weight": 1,
                PHI3 + "mlp.down_proj.weight": 1,
                "model.embed_tokens.weight": 0,
                "lm_head.weight": 0,
            },
        ),
    ],
)
@pytest.mark.parametrize("degree", [2, 4])
def test_local_shapes(
    on_ranks: OnRanks, family: str, whole: tuple[str, ...], cut: dict[str, int], degree: int
) -> None:
    """Cut where a contiguous cut exists; whole otherwise, and then said so."""
    full = {name: tuple(p.shape) for name, p in build_family(family).named_parameters()}
    for _, shapes, _, found in on_ranks(family, degree):
        for name, dim in cut.items():
            want = tuple(n // degree if i == dim else n for i, n in enumerate(full[name]))
            assert shapes[name] == want, name
        first = {n for n in full if ".1." not in n}
        assert {n for n in first if shapes[n] != full[n]} == set(cut)
        assert {where for code, where in found if code == "SC406" and ".1." not in where} == set(
            whole
        )
        assert not [code for code, _ in found if code in ("SC401", "SC405")]


def products(work: Work) -> int:
    return work.flops["linear"] + work.flops["head"]


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("family", [*KINDS, "encoder"])
def test_work_is_divided(on_ranks: OnRanks, family: str, degree: int) -> None:
    """Products exactly by the degree, but for K/V of fewer heads than ranks; so is what is kept."""
    (single, *_), *_ = on_ranks(family, 1)
    repeated = 0
    if family == "phi3" and degree == 4:  # 2 KV heads of 8: forward and two products backward
        repeated = LAYERS * 2 * 3 * 2 * TOKENS * HIDDEN * 16
    for work, *_ in on_ranks(family, degree):
        assert products(work) == (products(single) - repeated) // degree + repeated
        assert work.flops["attention"] * degree == single.flops["attention"]
        # Of a cut vocabulary nothing but its own logits; tables and ids are whole.
        assert work.saved_bytes <= 1.2 * single.saved_bytes / degree


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("family", [*KINDS, "encoder"])
def test_bytes_of_a_layer(on_ranks: OnRanks, family: str, degree: int) -> None:
    """4(P-1)/P * T*h*e forward and 1.5 x backward, as for separate weights."""
    element = 8
    shape = AttentionShape(2, LENGTH, 4, 4, 8, element, hidden=HIDDEN)
    steps = MegatronSp(degree).comm_steps(shape)
    layers = ("gpt_neox.layers.1", "transformer.h.1", "model.layers.1", "encoder.layers.1")
    for _, _, traffic, _ in on_ranks(family, degree):
        sent: Counter[tuple[str, str]] = Counter()
        for (label, kind, axis, phase), (_, size) in traffic.items():
            own = label.startswith(layers) and not label.endswith(("weight", "bias"))
            if axis == "tensor" and own:
                sent[kind, phase] += size
        assert dict(sent) == {(s.kind, s.phase): s.bytes_sent for s in steps}


class Attention(nn.Module):
    """q, k and v taken apart in one of the ways of users' code; products: x @ w, w [in, out]."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        if style == "products":
            for name in ("wq", "wk", "wv"):
                setattr(self, name, nn.Parameter(torch.empty(HIDDEN, HIDDEN)))
        else:
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        b, s, h = x.shape
        if self.style == "products":
            parts = [x @ w for w in (self.wq, self.wk, self.wv)]
            return tuple(t.view(b, s, 4, 8).transpose(1, 2) for t in parts)
        qkv = self.qkv(x)
        if self.style == "stacked":
            return qkv.view(b, s, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        if self.style == "picked":
            stack = qkv.reshape(b, s, 3, 4, 8).transpose(1, 3)
            return tuple(stack[:, :, i] for i in range(3))
        if self.style == "by heads":
            return tuple(t.transpose(1, 2) for t in qkv.view(b, s, 4, 3, 8).unbind(3))
        parts = qkv.split([h, h, h], dim=-1)
        return tuple(t.view(b, s, 4, 8).transpose(1, 2) for t in parts)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.emb = nn.Embedding(97, HIDDEN)
        self.attn = Attention(style)
        self.head = nn.Linear(HIDDEN, 97)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.emb(input_ids)
        logits = self.head(x + self.attn(x))
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return out


def make(style: str) -> nn.Module:
    with default_dtype(torch.float64):
        model = Model(style)
    initialise(model, 0)
    return model


@pytest.mark.parametrize(
    ("style", "plan"),
    plans.in_turn(
        ["stacked", "picked", "by heads", "split", "products"],
        [plans.megatron(4), plans.with_tensor(plans.ring(2), 2)],
    ),
    ids=lambda x: plans.name(x) if isinstance(x, dict) else x,
)
def test_ways_to_write_it(style: str, plan: plans.Plan) -> None:
    """Every way is exact, and the projections' work divided."""
    batch = family_inputs()
    want = reference(lambda: make(style), batch)

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        model(**local)["loss"].backward()
        gradient = compare_grads(want.gradients, whole_gradients(model, context), FP64)
        found = [f.code for f in seqcomp.of(model).report().findings]
        cuts = set(seqcomp.of(model).programs[-1].cuts)
        model.zero_grad()
        work = work_of(model, 97, lambda: model(**local)["loss"])
        return gradient, found, cuts, products(work)

    single = lockstep(lambda: make(style), ALONE, step, inputs=batch)[0][3]
    ranks = lockstep(lambda: make(style), plan, step, inputs=batch)
    for (gradient, worst), found, cuts, done in ranks:
        assert gradient <= 1, worst
        assert "SC401" not in found
        assert "SC405" not in found
        assert ("SC406" in found) == (style in ("stacked", "picked", "split"))
        assert ("attn.qkv.weight" in cuts) == (style == "by heads")
        assert ("attn.wk" in cuts) == (style == "products")
        assert "attn.out.weight" in cuts
        # Parts of 25, 25, 25 and 22 words; the rest divides evenly.
        assert done <= single / len(ranks) * 1.02
