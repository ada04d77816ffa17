"""The timeline of one block, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from seqcomp.cost.group import Group
from seqcomp.cost.kernels import attention_seconds, dense_seconds, stream_seconds
from seqcomp.cost.rounds import Rounds, Tiles, keeps_back, rounds_of
from seqcomp.cost.run import Run
from seqcomp.cost.shape import Block, ModelShape
from seqcomp.cost.source import seen_by, undivided
from seqcomp.cost.timeline import Timeline
from seqcomp.cost.unfused import Written, attends_again, computed, takes_dense_mask, written
from seqcomp.cost.widths import dtype_of, layout_of
from seqcomp.cost.workload import BlockSteps
from seqcomp.hardware.cluster import Device
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.strategies.base import AttentionShape, CommStep, Phase

BACKWARD = 2.5
"""FLOPs of attention's backward over those of its forward: the scores are computed again."""


@dataclass(frozen=True)
class Layer:
    """One block of a model on one rank: its pieces, and in which order they run.

    hidden: width between blocks. rounds: of attention, where it is not what the run says. Run,
    layout and ``over``, the plan, are those that the block sees (source.py); None: the group's.
    ``source``: tokens that keys and values are made of, where they are not the run's.
    """

    group: Group
    block: Block
    steps: BlockSteps
    run: Run
    layout: SequenceLayout
    hidden: int
    rounds: Rounds | None = None
    over: ResolvedPlan | None = None
    source: int = 0

    def forward(self, into: Timeline) -> None:
        """The pieces in their order."""
        self._forward(into, self.steps.tensor, "forward")

    def again(self, into: Timeline, *, keeps: bool) -> None:
        """The forward that checkpoints run a second time in backward; keeps: without attention that
        a kernel computes."""
        tensor = tuple(s for s in self.steps.again if s.axis == self._plan.tensor_axis)
        attends = not keeps or attends_again(self._plan, self.block, self.run)
        self._forward(into, tensor, "backward", attends=attends)

    def backward(self, into: Timeline) -> None:
        """Gradients, last piece first: twice the products, 2.5 x the attention."""
        gathers, scatters = self._tensor(self.steps.tensor, "backward")
        parts = 1 + (0 if self.block.by_tokens else self.block.attentions)
        each = len(gathers) // parts  # gradients, and inputs unless a second run has gathered them
        send = self.group.send
        send(into, "gradients", gathers[:each])
        into.compute("MLP backward", 2 * self.mlp)
        send(into, "gradients", scatters[:1])
        into.compute("norm backward", 2 * self.norm)
        if self.second is not None:
            send(into, "gradients", gathers[each : 2 * each])
            self.second._attention_backward(into)
            send(into, "gradients", scatters[1:2])
            into.compute("norm backward", 2 * self.norm)
        rest = max(parts - 1, 1)  # parts behind that of the first attention
        send(into, "gradients", gathers[each * rest :])
        self._attention_backward(into)
        send(into, "gradients", scatters[rest:])
        into.compute("norm backward", 2 * self.norm)

    def _attention_backward(self, into: Timeline) -> None:
        into.compute("output backward", 2 * self.out)
        self.attention(into, "backward")
        into.compute("q, k, v backward", 2 * self.qkv)

    def attention(self, into: Timeline, phase: Phase, *, again: bool = False) -> None:
        """Attention alone, its exchanges included, from q, k and v to its output or back; again: a
        second forward, whose keys over tensor ranks are in its own steps."""
        steps = self.steps.attention
        if again:
            steps = tuple(s for s in steps if s.axis != self._plan.tensor_axis)
        exchanges, ring = self._attention(steps, phase)
        self._attend(into, exchanges, ring, backward=phase == "backward")

    def _forward(
        self, into: Timeline, tensor: tuple[CommStep, ...], phase: Phase, *, attends: bool = True
    ) -> None:
        gathers, scatters = self._tensor(tensor, phase)
        parts = [self] if self.second is None else [self, self.second]
        cut = 0 if self.block.by_tokens else len(parts)
        for index, part in enumerate(parts):
            into.compute("norm", self.norm)
            self.group.send(into, "the sequence", gathers[index : index + 1][:cut])
            into.compute("q, k, v", part.qkv)
            if attends:
                part.attention(into, "forward", again=phase == "backward")
            into.compute("output", part.out)
            self.group.send(into, "sums", scatters[index : index + 1][:cut])
        into.compute("norm", self.norm)
        self.group.send(into, "the sequence", gathers[cut:])
        into.compute("MLP", self.mlp)
        self.group.send(into, "sums", scatters[cut:])

    @cached_property
    def second(self) -> Layer | None:
        """The attention of a decoder over an encoder, as a layer without an MLP."""
        block, cross, run = self.block, self.block.cross, self.run
        if cross is None:
            return None
        kv = replace(block.parameters, kv=cross.kv, whole=0)
        other = replace(block, mask="full", window=0, cross=None, parameters=kv)
        steps = replace(self.steps, attention=self.steps.cross)
        if not cross.source:
            return replace(self, block=other, steps=steps, run=replace(run, documents=None))
        plan = self._plan
        length = -(-run.seq_len // (plan.ring_size * plan.ulysses_size))
        every = ((float(length * cross.source), 1.0),)
        return replace(
            self, block=other, steps=steps, over=undivided(plan), source=cross.source,
            run=replace(run, seq_len=length, documents=None),
            layout=SequenceLayout("contiguous"), rounds=Rounds((every,), every),
        )  # fmt: skip

    # --- attention ---------------------------------------------------------------------------

    def _attend(
        self, into: Timeline, exchanges: list[CommStep], ring: list[CommStep], *, backward: bool
    ) -> None:
        what = "gradients of heads" if backward else "heads"
        self.group.send(into, what, exchanges[:1])
        self._rounds(into, ring, backward=backward)
        self.group.send(into, what, exchanges[1:])

    def _rounds(self, into: Timeline, ring: list[CommStep], *, backward: bool) -> None:
        work = self.work
        if not ring or ring[0].kind != "p2p":
            gathers = [s for s in ring if s.kind == "all_gather"]
            self.group.send(into, "keys and values", gathers)
            name = "attention backward" if backward else "attention"
            into.compute(name, self._tiles(work.whole, backward=backward))
            rest = [s for s in ring if s.kind != "all_gather"]
            self.group.send(into, "gradients of keys and values", rest)
            return
        merge = self._merge(backward=backward)
        known = {own: self._tiles(own, backward=backward) for own in set(work.each)}
        tiles = [known[own] + (merge if index else 0.0) for index, own in enumerate(work.each)]
        if backward:
            mask = self.run.mask(self.block.rule)
            kept = tiles[0] / 2 if keeps_back(mask, self.layout, self.run.seq_len) else 0.0
            tiles = [tiles[0] - kept, *tiles[1:], kept]
        keys, *grads = ring
        hop = self.group.seconds(keys) / keys.count
        hops = [hop if index < keys.count else 0.0 for index in range(len(tiles))]
        for step in grads:
            # The travelling sum starts behind the second block and ends behind what is kept back.
            for index in range(len(tiles) - step.count, len(tiles)):
                hops[index] += self.group.seconds(step) / step.count
        name = "attention backward" if backward else "attention"
        into.rounds(name, keys.axis, self.group.link(keys.axis), tiles, hops)

    def _tiles(self, tiles: Tiles, *, backward: bool) -> float:
        return sum(count * self._tile(pairs, backward=backward) for pairs, count in tiles)

    def _tile(self, pairs: float, *, backward: bool) -> float:
        own = self.heads
        flops = 2 * self.run.batch * pairs * (own.width + own.value_width)
        flops *= BACKWARD if backward else 1
        device, how = self._device, self.written
        scores = self.run.batch * own.heads * pairs
        if how is None:
            found = attention_seconds(device, self._dtype, pairs, flops, backward=backward)
            if takes_dense_mask(self._plan, self.block, self.run):  # every head reads it
                found = max(found, stream_seconds(device, scores * self.element))
            return found
        wide = how.wide and "fp32" in device.peak
        name, size = ("fp32", 4) if wide else (self._dtype, self.element)
        passes = how.backward if backward else how.forward
        products = dense_seconds(device, name, flops, math.sqrt(pairs), 0)
        return products + stream_seconds(device, passes * size * scores)

    def _merge(self, *, backward: bool) -> float:
        """Of a round's results into the sums so far, in fp32, and what else a round takes."""
        own, e = self.heads, self.heads.element_bytes
        tokens = self.run.batch * self.run.seq_len // self.layout.ring
        width = own.width + own.kv_heads * own.kv_head if backward else own.value_width
        moved = tokens * width * (2 * max(e, 4) + e)
        return stream_seconds(self._device, moved) + self._device.kernels.ring_round

    # --- pieces, seconds of a forward --------------------------------------------------------

    @cached_property
    def work(self) -> Rounds:
        """Of attention, in visible pairs."""
        plan, block, run = self._plan, self.block, self.run
        found = self.rounds or rounds_of(run.mask(block.rule), self.layout, run.seq_len)
        if self.written or takes_dense_mask(plan, block, run):
            return computed(found, plan, block, run, self.layout)
        return found

    @cached_property
    def written(self) -> Written | None:
        """How scores are written down, where they are."""
        return written(self._plan, self.block, self.run)

    @cached_property
    def heads(self) -> AttentionShape:
        """Heads that this rank attends with."""
        plan = self._plan
        shape = self.block.attention(self.run.batch, self.run.seq_len, self.element, self.hidden)
        return shape.on_tensor_rank(plan.tensor_size).on_ulysses_rank(plan.ulysses_size)

    @cached_property
    def element(self) -> int:
        """Bytes of an activation."""
        return dtype_of(self._plan, self.run)[1]

    @cached_property
    def tokens(self) -> float:
        """Of a tensor group: those that its products see."""
        plan = self._plan
        return self.run.batch * self.run.seq_len / (plan.ring_size * plan.ulysses_size)

    @cached_property
    def norm(self) -> float:
        """A norm and a residual sum."""
        ways = 1 if self.block.source else self._plan.tensor_size
        moved = 5 * self.tokens / ways * self.hidden * self.element
        return stream_seconds(self._device, moved)

    @cached_property
    def qkv(self) -> float:
        """Projections, and positions applied to queries and keys."""
        b, t = self.block, self._plan.tensor_size
        queries, kv = b.heads * b.head_dim / t, self._kv / (1 if t > b.kv_heads else t)
        keys = 0.0 if self.source else kv
        inner = queries + keys / self.hidden
        rotary = stream_seconds(self._device, 2 * self.tokens * inner * self.element)
        made_of = b.latent.queries if b.latent and b.latent.queries else self.hidden
        found = self._product(queries * made_of + keys, inner) + rotary
        if self.source:
            tokens = self.run.batch * self.source
            moved = (kv + tokens * (self.hidden + kv / self.hidden)) * self.element
            found += dense_seconds(self._device, self._dtype, 2 * tokens * kv, tokens, moved)
        if b.parameters.whole:
            moved = (b.parameters.whole + self.tokens / t * 2 * self.hidden) * self.element
            flops = 2 * self.tokens / t * b.parameters.whole
            found += dense_seconds(self._device, self._dtype, flops, self.tokens / t, moved)
        return found

    @property
    def _kv(self) -> int:
        """Parameters of its projections to keys and values."""
        cross = self.block.cross
        return self.block.parameters.kv - (cross.kv if cross is not None else 0)

    @cached_property
    def out(self) -> float:
        """The projection of attention's output."""
        width = self.block.heads * (self.block.value_dim or self.block.head_dim)
        inner = width / self._plan.tensor_size
        return self._product(inner * self.hidden, inner)

    @cached_property
    def mlp(self) -> float:
        """Its products and what stands between them."""
        b, t = self.block, self._plan.tensor_size
        attention = b.attention_matrices(self.hidden) + b.parameters.kv + b.parameters.whole
        rest = max(b.active_parameters - attention, 0) / t
        inner = b.mlp_width * max(b.active, 1) / t
        between = (3 if b.gated else 2) * self.tokens * inner * self.element
        return self._product(rest, inner) + stream_seconds(self._device, between)

    def _product(self, weights: float, inner: float) -> float:
        """Of all tokens with a matrix of ``weights`` numbers on this rank."""
        moved = (weights + self.tokens * (self.hidden + inner)) * self.element
        flops = 2 * self.tokens * weights
        return dense_seconds(self._device, self._dtype, flops, self.tokens, moved)

    @property
    def _plan(self) -> ResolvedPlan:
        return self.over or self.group.plan

    @property
    def _device(self) -> Device:
        return self.group.cluster.device

    @cached_property
    def _dtype(self) -> str:
        return dtype_of(self._plan, self.run)[0]

    # --- steps -------------------------------------------------------------------------------

    def _tensor(
        self, steps: tuple[CommStep, ...], phase: Phase
    ) -> tuple[list[CommStep], list[CommStep]]:
        """Gathers and scatters of a phase, one by one."""
        found = [s for s in steps if s.phase == phase]
        gathers = [s for s in found if s.kind == "all_gather"]
        return gathers, [s for s in found if s.kind != "all_gather"]

    def _attention(
        self, steps: tuple[CommStep, ...], phase: Phase
    ) -> tuple[list[CommStep], list[CommStep]]:
        """Exchanges of ulysses, and steps of the ring."""
        own, ring = [s for s in steps if s.phase == phase], self._plan.ring_axis
        return [s for s in own if s.axis != ring], [s for s in own if s.axis == ring]


def layer_of(group: Group, model: ModelShape, block: Block, steps: BlockSteps, run: Run) -> Layer:
    """A block of a model, of which one sends `steps`; ``run`` as ranks see it, padded."""
    over, own = seen_by(group.plan, block, run)
    layout = SequenceLayout("contiguous") if block.source else layout_of(group.plan, model, run)
    return Layer(group, block, steps, own, layout, model.hidden, over=over)
