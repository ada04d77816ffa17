"""Factors survive views: what a rank holds of a view is the view of what it holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import sympy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqcomp.capture.sizes import BATCH_SYMBOL, LENGTH_SYMBOL, evaluate, product
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.lowering.redistribute import refine
from seqcomp.placement.spec import Dim, Factor, Spec, merged, regroup, replicated, whole

BS, SS = BATCH_SYMBOL, LENGTH_SYMBOL
VALUES = {BS: 4, SS: 24}
DEGREES = {"data": 2, "ring": 2, "ulysses": 3}
LAYOUT = SequenceLayout("zigzag", 2, 3)
relaxed = settings(deadline=None, max_examples=150)

# The batch is dealt out in pieces, the sequence by a permutation, heads by nothing yet.
CUT = {BS: ("data",), SS: ("ring", "ulysses")}
atom = st.sampled_from([BS, SS, sympy.Integer(2), sympy.Integer(3), sympy.Integer(6)])


@st.composite
def shapes(draw: st.DrawFn) -> list[sympy.Expr]:
    """A shape with B and S at most once each."""
    sizes = draw(st.lists(atom, min_size=1, max_size=4))
    assume(sizes.count(BS) <= 1 and sizes.count(SS) <= 1)
    return sizes


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """A placement of a shape with B, S or both cut, or neither."""
    dims: list[Dim] = []
    for size in draw(shapes()):
        axes = CUT.get(size, ()) if draw(st.booleans()) else ()
        dims.append(merged((Factor(size, axes),)))
    return Spec(tuple(dims))


@st.composite
def groupings(draw: st.DrawFn, spec: Spec) -> list[sympy.Expr]:
    """A new shape of the same elements: neighbours joined, and some dims split."""
    sizes: list[sympy.Expr] = []
    for index in range(len(spec.dims)):
        size = spec.size(index)
        if size == 6 and draw(st.booleans()):
            sizes += [sympy.Integer(2), sympy.Integer(3)]
        else:
            sizes.append(size)
    result: list[sympy.Expr] = []
    for size in sizes:
        if result and draw(st.booleans()):
            result[-1] = sympy.expand(result[-1] * size)
        else:
            result.append(size)
    return result


def shape_of(sizes: Sequence[sympy.Expr]) -> list[int]:
    return [evaluate(s, VALUES) for s in sizes]


def places() -> list[dict[str, int]]:
    return [
        dict(zip(DEGREES, p, strict=True))
        for p in itertools.product(*(range(n) for n in DEGREES.values()))
    ]


def cut(x: Tensor, spec: Spec, place: Mapping[str, int]) -> Tensor:
    """What the rank at `place` holds of a global tensor."""
    for index, dim in enumerate(spec.dims):
        if not any(f.axes for f in dim):
            continue
        sizes = [evaluate(f.size, VALUES) for f in dim]
        x = x.unflatten(index, sizes)
        for offset, (factor, size) in enumerate(zip(dim, sizes, strict=True)):
            if factor.axes == CUT[SS]:
                rank = place["ring"] * DEGREES["ulysses"] + place["ulysses"]
                tokens = torch.tensor(LAYOUT.token_index(size, rank))
                x = x.index_select(index + offset, tokens)
                continue
            for axis in factor.axes:
                x = x.tensor_split(DEGREES[axis], index + offset)[place[axis]]
        x = x.flatten(index, index + len(dim) - 1)
    return x


def local_shape(spec: Spec, sizes: Sequence[sympy.Expr]) -> list[int]:
    """Sizes of the result with the degree of each dim's axes taken out, as views are lowered."""
    return [
        n // math.prod(DEGREES[a] for a in spec.axes_of(i)) for i, n in enumerate(shape_of(sizes))
    ]


def global_tensor(sizes: Sequence[sympy.Expr]) -> Tensor:
    shape = shape_of(sizes)
    return torch.arange(math.prod(shape)).reshape(shape)


EVEN = {"data": 2}


@relaxed
@given(st.data())
def test_a_local_view_is_the_view_cut(data: st.DataObject) -> None:
    spec = data.draw(specs())
    sizes = data.draw(groupings(spec))
    found = regroup(spec.dims, sizes, EVEN)
    if isinstance(found, Factor):
        assert spec.axes, "a view of whole dims is always possible"
        return
    result = Spec(found)
    assert [result.size(i) for i in range(len(sizes))] == [sympy.expand(s) for s in sizes]
    assert sorted(result.axes) == sorted(spec.axes)
    x = global_tensor([spec.size(i) for i in range(len(spec.dims))])
    for place in places():
        local = cut(x, spec, place).reshape(local_shape(result, sizes))
        assert torch.equal(local, cut(x.reshape(shape_of(sizes)), result, place))


@relaxed
@given(st.data())
def test_joining_dims_never_tears(data: st.DataObject) -> None:
    """Flattening keeps every sharding, and viewing back restores the placement."""
    spec = data.draw(specs())
    sizes = [spec.size(i) for i in range(len(spec.dims))]
    flat = regroup(spec.dims, [product(sizes)], EVEN)
    assert not isinstance(flat, Factor)
    back = regroup(flat, sizes, EVEN)
    assert back == spec.dims


def test_a_batch_cut_in_even_pieces() -> None:
    """[8, S] over data 2 as [4, 2, S]: the outer part is cut; [2, 4, S] too; [1, 8, S] is not."""
    eight: Dim = (Factor(sympy.Integer(8), ("data",)),)
    four = regroup((eight, whole(SS)), [sympy.Integer(4), sympy.Integer(2), SS], EVEN)
    assert four == ((Factor(sympy.Integer(4), ("data",)),), whole(sympy.Integer(2)), whole(SS))
    torn = regroup((eight,), [sympy.Integer(1), sympy.Integer(8)], EVEN)
    assert torn == ((), eight)


def test_a_sequence_is_never_cut_in_two() -> None:
    """Its tokens are dealt out by a permutation."""
    tokens: Dim = (Factor(sympy.Integer(24), ("ring",)),)
    found = regroup((tokens,), [sympy.Integer(2), sympy.Integer(12)], EVEN)
    assert found == tokens[0]


@relaxed
@given(st.data())
def test_common_refinement(data: st.DataObject) -> None:
    """Steps multiply to the dim; each holds one factor of either side or a part of a whole one."""
    atoms = data.draw(st.permutations([BS, SS, sympy.Integer(2), sympy.Integer(3)]))

    def side() -> Dim:
        factors = [
            Factor(a, CUT[a] if a in CUT and data.draw(st.booleans()) else ()) for a in atoms
        ]
        return merged(tuple(factors))

    old, new = side(), side()
    steps = refine(old, new)
    assert product(s for s, _, _ in steps) == product(atoms)
    rebuilt = [merged(tuple(Factor(s[0], s[at]) for s in steps)) for at in (1, 2)]
    assert rebuilt == [old, new]


@given(specs())
@relaxed
def test_axes_and_sizes(spec: Spec) -> None:
    sizes = [spec.size(i) for i in range(len(spec.dims))]
    assert spec.without(spec.axes) == replicated(sizes)
    assert spec.is_replicated == (not spec.axes)
    for axis in spec.axes:
        assert axis not in spec.without([axis]).axes


@given(specs())
@relaxed
def test_placements_of_plain_cuts_are_those_of_dtensor(spec: Spec) -> None:
    from torch.distributed.tensor import Replicate, Shard

    placements = dict(zip(DEGREES, spec.placements(tuple(DEGREES), VALUES), strict=True))
    for axis, placement in placements.items():
        at = [i for i in range(len(spec.dims)) if axis in spec.axes_of(i)]
        assert placement == (Shard(at[0]) if at else Replicate())
