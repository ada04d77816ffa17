"""Collectives between processes, over a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from seqcomp.runtime.comm import (
    Arrived,
    Communicator,
    Pending,
    Reduction,
    sum_in_rank_order,
)
from seqcomp.runtime.lost import Census
from seqcomp.runtime.posted import Posted, wait_all
from seqcomp.runtime.traffic import Phase, Traffic

_COLLECTIVE_TAG = 0x5EC1
"""Keeps the messages of collectives on the CPU apart from all others on the same group."""

P = ParamSpec("P")
T = TypeVar("T")

_MOST_TENSORS = 4  # of one exchange: each has a tag of its own


def _named(method: Callable[Concatenate[ProcessCommunicator, P], T]) -> Callable[..., T]:
    """Collectives that fail because a rank has ended say which, and where."""

    @wraps(method)
    def run(self: ProcessCommunicator, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._census.naming(self._doing):
            return method(self, *args, **kwargs)

    return run


class ProcessCommunicator(Communicator):
    """A communicator over a process group, whose own ranks are sorted by global rank."""

    def __init__(
        self,
        axis: str,
        ranks: list[int],
        rank: int,
        traffic: Traffic,
        group: dist.ProcessGroup | None,
        census: Census,
    ) -> None:
        super().__init__(axis, len(ranks), rank, traffic)
        self._group = group
        self._census = census
        self._doing = ""
        self._ranks = ranks
        self._exchanges = 0
        # Places in the group's own order.
        self._peers = ranks if group is None else [dist.get_group_rank(group, r) for r in ranks]
        # Row of the group's order -> row of ours, and back; None where they agree.
        agree = self._peers == sorted(self._peers)
        self._to_nested = None if agree else self._peers
        self._to_group = None if agree else [self._peers.index(i) for i in range(self.size)]

    # On the CPU collectives are messages between pairs: gloo's own cost up to twice the time,
    # its reduce-scatter sends each byte twice, and sums come out in the order, and so with the
    # rounding, of ranks in threads.

    def count(self, kind: str, sent: int, phase: Phase, label: str) -> None:
        super().count(kind, sent, phase, label)
        self._doing = f"{kind} over {self.axis} for {label or 'the call'} ({phase})"

    @_named
    def _start_all_gather(self, x: Tensor) -> Pending:
        out = x.new_empty((self.size, *x.shape))
        if x.device.type == "cpu":
            works = self._post([x] * self.size, out.unbind())
            out[self.rank].copy_(x)
            return self._posted(works, [x], lambda: [out])
        work = dist.all_gather_single(out.view(-1), x.view(-1), group=self._group, async_op=True)
        order = self._to_nested
        return self._posted([work], [x], lambda: [out if order is None else out[order]])

    @_named
    def _reduce_scatter(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            rows = list(torch.empty_like(x).unbind())
            works = self._post(x.unbind(), rows)
            rows[self.rank] = x[self.rank]
            wait_all(works)
            return sum_in_rank_order(rows)
        x = x if self._to_group is None else x[self._to_group]
        out = torch.empty_like(x[0])
        dist.reduce_scatter_single(out.view(-1), x.view(-1), group=self._group)
        return out

    @_named
    def _start_all_reduce(self, x: Tensor, op: Reduction) -> Pending:
        if x.device.type == "cpu" and self.size == 2 and op == "sum":
            rows = [x, x]
            rows[1 - self.rank] = torch.empty_like(x)
            return self._posted(self._post([x, x], rows), [x], lambda: [sum_in_rank_order(rows)])
        out = x.clone()
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        work = dist.all_reduce(out, reduce_op, group=self._group, async_op=True)
        return self._posted([work], [], lambda: [out])

    @_named
    def _all_to_all(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        if x.device.type == "cpu":
            works = self._post(x.unbind(), out.unbind())
            out[self.rank].copy_(x[self.rank])
            wait_all(works)
            return out
        x = x if self._to_group is None else x[self._to_group]
        dist.all_to_all_single(out, x, group=self._group)
        return out if self._to_nested is None else out[self._to_nested]

    def _post(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> list[dist.Work]:
        """One message to and from every other rank, in rank order; contiguous tensors.

        Of empty ones both sides know.
        """
        group, others = self._group, [i for i in range(self.size) if i != self.rank]
        assert group is not None
        # gloo matches messages of one tag between two ranks in the order of their posting.
        return [
            *(
                group.recv([receives[i]], self._peers[i], _COLLECTIVE_TAG)
                for i in others
                if receives[i].numel()
            ),
            *(
                group.send([sends[i]], self._peers[i], _COLLECTIVE_TAG)
                for i in others
                if sends[i].numel()
            ),
        ]

    @_named
    def _start_exchange(
        self, sends: list[Tensor], receives: list[Tensor], to: int, source: int
    ) -> Pending:
        # NCCL wants all ranks in the first call of a group, and not all may have something to do.
        if not self._exchanges and "nccl" in dist.get_backend_config(self._group):
            dist.barrier(self._group)
        # Several exchanges may be on their way between the same two ranks: gloo tells them apart
        # by tag, NCCL by order.
        self._exchanges += 1
        tag = self._exchanges % 4096 * _MOST_TENSORS
        ops = [
            dist.P2POp(op, x, self._ranks[peer], self._group, tag=tag + i)
            for op, tensors, peer in ((dist.isend, sends, to), (dist.irecv, receives, source))
            for i, x in enumerate(tensors)
        ]
        assert max(len(sends), len(receives)) <= _MOST_TENSORS
        if not ops:
            return Arrived([])
        return self._posted(dist.batch_isend_irecv(ops), sends, lambda: receives)

    @_named
    def _exchange_all(self, sends: list[Tensor], receives: list[Tensor]) -> None:
        if sends[0].device.type == "cpu":
            wait_all(self._post(sends, receives))
            return
        order = range(self.size) if self._to_group is None else self._to_group
        ours, theirs = [sends[i] for i in order], [receives[i] for i in order]
        packed, sizes = torch.cat(ours), [len(x) for x in theirs]
        out = packed.new_empty(sum(sizes))
        dist.all_to_all_single(out, packed, sizes, [len(x) for x in ours], group=self._group)
        for x, part in zip(theirs, out.split(sizes), strict=True):
            x.copy_(part)

    def _posted(
        self, works: list[dist.Work], sends: list[Tensor], finish: Callable[[], list[Tensor]]
    ) -> Pending:
        return Posted(works, sends, finish, partial(self._census.naming, self._doing))
