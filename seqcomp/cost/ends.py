"""The timeline of what is outside of the blocks: embedding, head, loss, gradients, optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from seqcomp.cost.group import Group
from seqcomp.cost.kernels import dense_seconds, stream_seconds
from seqcomp.cost.memory import block_parameters
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.cost.timeline import Timeline
from seqcomp.cost.weights import sharding
from seqcomp.cost.widths import dtype_of, widths_of
from seqcomp.cost.workload import Workload
from seqcomp.strategies.base import CommStep, Phase


@dataclass(frozen=True)
class End:
    """What a step does before its first and behind its last block."""

    group: Group
    model: ModelShape
    work: Workload
    run: Run

    def into(self, timeline: Timeline) -> None:
        """Forward and, where the run trains, backward and optimizer.

        Parameters of the root and the embedding are gathered before anything runs, their gradients
        summed when nothing runs any more; the first block has no one to hide its gather, nor the
        last to be differentiated its sums. Other parameters that are apart travel behind.
        """
        send = self.group.send
        send(
            timeline, "parameters", [*self._steps("gradients", "forward"), *self._first("forward")]
        )
        send(timeline, "the embedding", self._steps("embedding", "forward"))
        send(timeline, "the source", self._steps("source", "forward"))
        send(timeline, "the sequence", self._steps("head", "forward"))
        timeline.compute("head and loss", self._head())
        send(timeline, "the loss", self._steps("loss", "forward"))
        send(timeline, "logits", self._steps("logits", "forward"))
        send(timeline, "hidden states", self._steps("states", "forward"))
        behind = self._steps("behind", "forward")
        if not self.run.trains:
            self.group.behind(timeline, "parameters", behind)
            return
        send(timeline, "the loss", self._steps("loss", "backward"))
        send(timeline, "gradients", self._steps("head", "backward"))
        timeline.compute("head and loss backward", 2 * self._head())
        send(timeline, "gradients", self._steps("source", "backward"))
        send(timeline, "the embedding", self._steps("embedding", "backward"))
        rest = [*self._steps("gradients", "backward"), *self._first("backward")]
        send(timeline, "gradients of parameters", rest)
        timeline.compute("AdamW", self._optimizer())
        self.group.behind(timeline, "parameters", [*behind, *self._steps("behind", "backward")])

    def _steps(self, where: str, phase: Phase) -> list[CommStep]:
        return [s for place, s in self.work.ends if place == where and s.phase == phase]

    def _first(self, phase: Phase) -> list[CommStep]:
        if not self.work.blocks or not sharding(self.group.plan)[0]:
            return []
        kind = "all_gather" if phase == "forward" else "reduce_scatter"
        return [s for s in self.work.blocks[0].parameters if s.phase == phase and s.kind == kind]

    def _head(self) -> float:
        plan, model, device = self.group.plan, self.model, self.group.cluster.device
        name, e = dtype_of(plan, self.run)
        tokens = self.run.batch * (self.run.seq_len if self.run.trains else 1)
        tokens = -(-tokens // (plan.ring_size * plan.ulysses_size)) if self.run.trains else tokens
        words = model.vocab / plan.tensor_size
        moved = (words * model.hidden + tokens * (words + model.hidden)) * e
        flops = 2 * tokens * words * model.hidden
        # Logits are read and written about four times on the way to the loss, in fp32.
        loss = stream_seconds(device, 16 * tokens * words) if self.run.trains else 0.0
        return dense_seconds(device, name, flops, tokens, moved) + loss

    def _optimizer(self) -> float:
        plan, model = self.group.plan, self.model
        ways = math.prod(plan.axes[a] for a in sharding(plan)[0])
        t = plan.tensor_size
        held = sum(b.count * block_parameters(b, t) for b in model.blocks)
        held += (model.embedding + model.head) // t + model.other
        # Weight, gradient and two moments are read, all but the gradient written.
        moved = 7 * held / ways * widths_of(plan, self.run).kept
        return stream_seconds(self.group.cluster.device, moved)
