"""Bytes per rank and layer: the table of formulas, its special cases and published numbers."""

from fractions import Fraction
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqcomp.layout.sequence import SequenceLayout
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve
from seqcomp.strategies.base import AttentionShape, CommStep, Phase, attention_flops, total_bytes
from seqcomp.strategies.compose import layer_steps
from seqcomp.strategies.data import Data, Fsdp
from seqcomp.strategies.megatron_sp import MegatronSp
from seqcomp.strategies.ring import Ring, causal_imbalance
from seqcomp.strategies.ulysses import Ulysses
from seqcomp.strategies.usp import Usp

LLAMA_8B = AttentionShape(1, 131072, heads=32, kv_heads=8, head_dim=128)
LLAMA_70B = AttentionShape(1, 131072, heads=64, kv_heads=8, head_dim=128)
LLAMA_405B = AttentionShape(1, 131072, heads=128, kv_heads=8, head_dim=128)


def forward(steps: tuple[CommStep, ...]) -> int:
    return total_bytes(steps, "forward")


def backward(steps: tuple[CommStep, ...]) -> int:
    return total_bytes(steps, "backward")


@pytest.mark.parametrize(
    ("shape", "megatron", "ulysses", "ring"),
    [
        (LLAMA_8B, "3.76", "0.294", "0.470"),
        (LLAMA_70B, "7.52", "0.528", "0.470"),
        (LLAMA_405B, "15.0", "0.998", "0.470"),
    ],
)
def test_gigabytes_at_128k_on_8_ranks(
    shape: AttentionShape, megatron: str, ulysses: str, ring: str
) -> None:
    for strategy, expected in (
        (MegatronSp(8), megatron), (Ulysses(8), ulysses), (Ring(8), ring),
    ):  # fmt: skip
        digits = len(expected.split(".")[1])
        # The published figures are truncated or rounded: one unit of the last digit.
        assert abs(forward(strategy.comm_steps(shape)) / 1e9 - float(expected)) < 10**-digits


@st.composite
def shapes(draw: st.DrawFn, degree: int) -> AttentionShape:
    """Shapes whose heads ``degree`` divides and whose length it divides often enough."""
    kv = draw(st.sampled_from([d for d in range(1, 4 * degree + 1)
                               if d % degree == 0 or degree % d == 0]))  # fmt: skip
    heads = lcm(kv, degree) * draw(st.integers(1, 3))
    return AttentionShape(
        batch=draw(st.integers(1, 3)),
        length=degree**4 * draw(st.integers(1, 50)),
        heads=heads,
        kv_heads=kv,
        head_dim=draw(st.sampled_from([4, 8, 64, 128])),
        element_bytes=draw(st.sampled_from([2, 4, 8])),
        accumulator_bytes=draw(st.sampled_from([4, 8])),
        hidden=draw(st.integers(1, 100)) * degree,
    )


DEGREES = st.sampled_from([1, 2, 3, 4, 8])


@given(st.data(), DEGREES)
def test_formulas(data: st.DataObject, p: int) -> None:
    s = data.draw(shapes(p))
    t, a, e, d = s.tokens, s.width, s.element_bytes, s.head_dim
    share = Fraction(p - 1, p)
    megatron = MegatronSp(p).comm_steps(s)
    assert forward(megatron) == 4 * share * t * s.hidden * e
    assert backward(megatron) == Fraction(3, 2) * forward(megatron)
    ulysses = Ulysses(p).comm_steps(s)
    assert forward(ulysses) == share / p * t * (2 * a + 2 * max(s.kv_heads, p) * d) * e
    assert backward(ulysses) == forward(ulysses)
    for transport in ("p2p", "allgather"):
        ring = Ring(p, transport=transport).comm_steps(s)
        assert forward(ring) == 2 * share * t * s.kv_heads * d * e
        assert backward(ring) == 2 * share * t * s.kv_heads * d * (e + s.accumulator_bytes)


@given(st.data(), DEGREES, DEGREES)
def test_usp_formula(data: st.DataObject, r: int, u: int) -> None:
    s = data.draw(shapes(u))
    s = AttentionShape(**{**{f: getattr(s, f) for f in s.__slots__}, "length": s.length * r * u})
    t, e, d, kv = s.tokens, s.element_bytes, s.head_dim, max(s.kv_heads, u)
    inner = Fraction(u - 1, u) * Fraction(t, u * r) * (2 * s.width + 2 * kv * d) * e
    outer = 2 * Fraction(r - 1, r) * t * kv * d * e / u
    grads = 2 * Fraction(r - 1, r) * t * kv * d * (e + s.accumulator_bytes) / u
    steps = Usp(Ring(r), Ulysses(u)).comm_steps(s)
    assert forward(steps) == inner + outer
    assert backward(steps) == inner + grads


@given(st.data(), DEGREES)
def test_usp_with_one_axis_is_the_pure_case(data: st.DataObject, p: int) -> None:
    shape = data.draw(shapes(p))
    assert Usp(Ring(1), Ulysses(p)).comm_steps(shape) == Ulysses(p).comm_steps(shape)
    assert Usp(Ring(p), Ulysses(1)).comm_steps(shape) == Ring(p).comm_steps(shape)
    assert Usp(Ring(1), Ulysses(1)).comm_steps(shape) == ()


@pytest.mark.parametrize("group", [1, 4, 8])
def test_ulysses_sends_less_than_ring_beyond_one_plus_group(group: int) -> None:
    shape = AttentionShape(1, 64 * 3**3 * 5**2 * 7**2, heads=840 * group, kv_heads=840, head_dim=8)
    for p in (2, 3, 4, 5, 6, 7, 8, 10, 12):
        ulysses = forward(Ulysses(p).comm_steps(shape))
        ring = forward(Ring(p).comm_steps(shape))
        assert (ulysses < ring) == (p > 1 + group)
        assert (ulysses == ring) == (p == 1 + group)


@pytest.mark.parametrize(("shape", "limit"), [(LLAMA_70B, 9.1), (LLAMA_405B, 18.3)])
def test_crossover_with_replicated_kv_heads(shape: AttentionShape, limit: float) -> None:
    assert limit == pytest.approx(shape.width / ((shape.kv_heads - 1) * shape.head_dim), abs=0.05)
    for p in (16, 32, 64):
        cheaper = forward(Ulysses(p).comm_steps(shape)) < forward(Ring(p).comm_steps(shape))
        assert cheaper == (p > limit)


def test_kinds_counts_and_overlap() -> None:
    ring = Ring(4).comm_steps(LLAMA_8B)
    assert [(s.kind, s.count, s.phase, s.overlappable) for s in ring] == [
        ("p2p", 3, "forward", True),
        ("p2p", 3, "backward", True),
        ("p2p", 3, "backward", True),
    ]
    gathered = Ring(4, transport="allgather").comm_steps(LLAMA_8B)
    assert {s.kind for s in gathered} == {"all_gather", "reduce_scatter"}
    assert not any(s.overlappable for s in gathered)
    assert sum(s.count for s in Ulysses(4).comm_steps(LLAMA_8B) if s.phase == "forward") == 2
    megatron = MegatronSp(4).comm_steps(LLAMA_8B)
    counts: dict[tuple[str, Phase], int] = {(s.kind, s.phase): s.count for s in megatron}
    assert counts == {
        ("all_gather", "forward"): 2, ("reduce_scatter", "forward"): 2,
        ("all_gather", "backward"): 4, ("reduce_scatter", "backward"): 2,
    }  # fmt: skip


def test_one_rank_sends_nothing() -> None:
    for strategy in (Ring(1), Ulysses(1), MegatronSp(1), Data(4), Fsdp(4)):
        assert strategy.comm_steps(LLAMA_8B) == ()
    assert Data(1).gradient_steps(100) == Fsdp(1).gradient_steps(100) == ()


def test_gradients_of_parameters() -> None:
    assert total_bytes(Data(4).gradient_steps(1000)) == 1500
    assert total_bytes(Fsdp(4).gradient_steps(1000)) == 2250
    assert total_bytes(Fsdp(4, reshard=False).gradient_steps(1000)) == 1500
    # Half of the parameters trained, and their shards of 125 summed over 2 replicas.
    hybrid = Fsdp(4, replicas=2, replica_axis="data").gradient_steps(1000, 500)
    assert [(s.kind, s.bytes_sent) for s in hybrid] == [
        ("all_gather", 750), ("all_gather", 750), ("reduce_scatter", 375), ("all_reduce", 125),
    ]  # fmt: skip
    assert {s.kind for s in Fsdp(4).gradient_steps(1000, 0)} == {"all_gather"}


def test_layers_of_a_plan() -> None:
    plain = layer_steps(resolve(load_plan("data_2+usp_4x8")), LLAMA_8B)
    assert plain == Usp(Ring(4), Ulysses(8)).comm_steps(LLAMA_8B)
    assert {step.axis for step in plain} == {"ring", "ulysses"}
    text = (
        "mesh: {r: 4}\nstrategies: {ring: {axis: r}}\n"
        "overrides: [{match: a.1, ring: {transport: allgather}}]\n"
    )
    overridden = resolve(load_plan(text))
    assert {step.kind for step in layer_steps(overridden, LLAMA_8B, "a.0")} == {"p2p"}
    assert "all_gather" in {step.kind for step in layer_steps(overridden, LLAMA_8B, "a.1")}
    assert {step.axis for step in layer_steps(overridden, LLAMA_8B)} == {"r"}


def test_beside_a_tensor_axis() -> None:
    resolved = resolve(load_plan("usp_2x2"))
    object.__setattr__(resolved, "tensor_axis", "tensor")
    object.__setattr__(resolved, "axes", {"ring": 2, "ulysses": 2, "tensor": 16})
    t = LLAMA_8B.tokens
    steps = layer_steps(resolved, LLAMA_8B)
    tensor = [step for step in steps if step.axis == "tensor" and step.phase == "forward"]
    assert sum(step.bytes_sent for step in tensor) == 4 * 15 * (t // 4) * 4096 * 2 // 16
    # 2 query heads and 1 KV head per tensor rank: the KV head is repeated for both.
    exchanged = [step for step in steps if step.axis == "ulysses" and step.phase == "forward"]
    assert sum(step.bytes_sent for step in exchanged) == (t // 2) * (2 * 2 + 2 * 2) * 128 * 2 // 4
    passed = [step for step in steps if step.axis == "ring" and step.phase == "forward"]
    assert sum(step.bytes_sent for step in passed) == 2 * t * 1 * 128 * 2 // 2


def test_legal_degrees() -> None:
    assert Ulysses(8).legal_degrees(LLAMA_8B) == (1, 2, 4, 8, 16, 32)
    assert Usp(Ring(3), Ulysses(8)).legal_degrees(LLAMA_8B) == (1, 2, 4, 8, 16, 32)
    assert MegatronSp(8, mlp_width=12).legal_degrees(LLAMA_8B) == (1, 2, 4)
    assert Ring(7).legal_degrees(LLAMA_8B) is None


def test_flops() -> None:
    small = AttentionShape(2, 16, heads=4, kv_heads=2, head_dim=8)
    assert attention_flops(small, causal=False, phase="forward") == 4 * 2 * 16**2 * 32
    assert attention_flops(small, causal=True, phase="forward") == 2 * 2 * 16 * 17 * 32
    assert attention_flops(small, causal=True, phase="backward") == 5 * 2 * 16 * 17 * 32


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("kind", ["contiguous", "striped", "zigzag"])
def test_causal_imbalance_is_what_counting_gives(kind: str, degree: int) -> None:
    length = 240
    layout = SequenceLayout(kind, degree)
    work = [
        sum(position + 1 for part in layout.ring_ranges(length, rank) for position in part)
        for rank in range(degree)
    ]
    assert causal_imbalance(kind, length, degree) == Fraction(max(work) * degree, sum(work))
