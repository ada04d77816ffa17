"""The only place that makes process groups.

Groups are cached by the partition of the ranks they belong to, counted, shared by all contexts
that need the same partition, and destroyed when the last of them closes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from seqcomp.runtime.comm import (
    Arrived,
    Communicator,
    Pending,
    RankContext,
    Reduction,
    sum_in_rank_order,
)
from seqcomp.runtime.host import GlooHost, LonelyHost, PrefixedStore
from seqcomp.runtime.lost import Census
from seqcomp.runtime.posted import Posted, wait_all
from seqcomp.runtime.traffic import Phase, Traffic

__all__ = ["Communicator", "RankContext", "Traffic", "group_count", "process_context"]

_COLLECTIVE_TAG = 0x5EC1
"""Keeps the messages of collectives on the CPU apart from all others on the same group."""

P = ParamSpec("P")
T = TypeVar("T")

_MOST_TENSORS = 4  # of one exchange: each has a tag of its own

Partition = tuple[tuple[int, ...], ...]
"""Disjoint sets of global ranks, each sorted, that together cover a mesh."""

_Key = tuple[Partition, str, str]


@dataclass
class _Entry:
    group: dist.ProcessGroup
    world: dist.ProcessGroup
    users: int = 0
    pinned: bool = False


# Keyed by (partition, backend, purpose). A whole partition, not one's own ranks: creating groups is
# collective, so whether it happens must be decided alike on every rank.
_groups: dict[_Key, _Entry] = {}


def group_count() -> int:
    """How many process groups seqcomp has made and not destroyed."""
    _forget_dead_groups()
    return len(_groups)


def process_context(
    sizes: dict[str, int], mesh: DeviceMesh | None = None, device: torch.device | None = None
) -> RankContext:
    """The context of this process in a mesh of ``sizes`` (axis -> size, outermost first).

    Ranks are laid out row-major, or as in ``mesh``, whose axes must then be those of ``sizes`` in
    the same order and whose groups are used for single axes. ``device`` defaults to the CPU for
    gloo and to the current accelerator otherwise. Needs an initialised default group.
    """
    return ProcessContext(sizes, mesh, device)


class ProcessContext(RankContext):
    """See ``process_context``."""

    def __init__(
        self, sizes: dict[str, int], mesh: DeviceMesh | None, device: torch.device | None
    ) -> None:
        assert dist.is_initialized(), "torch.distributed is not initialised"
        rank = dist.get_rank()
        shape = tuple(sizes.values())
        if mesh is None:
            grid = torch.arange(dist.get_world_size()).reshape(shape)
        else:
            assert tuple(mesh.mesh.shape) == shape, f"mesh {mesh.mesh.shape} is not {shape}"
            grid = mesh.mesh.cpu()
        place = (grid == rank).nonzero()
        assert len(place) == 1, f"rank {rank} is not in the mesh"
        if device is None:
            device = _default_device()
        super().__init__(sizes, dict(zip(sizes, place[0].tolist(), strict=True)), rank, device)
        self._grid = grid
        self._mesh = mesh
        self._comms: dict[tuple[str, ...], ProcessCommunicator] = {}
        self._used: list[_Key] = []
        self._closed = False
        store = dist.distributed_c10d._get_default_store()
        self.census = Census(store, rank, grid.flatten().tolist())
        alone = self.world_size == 1
        self.host = LonelyHost() if alone else GlooHost(self._host_group(), self.census)
        self.store = PrefixedStore(self.census)

    def comm(self, axes: tuple[str, ...]) -> Communicator:
        if axes not in self._comms:
            assert not self._closed, "the context is closed"
            self._comms[axes] = self._make(axes)
        return self._comms[axes]

    def device_mesh(self, axis: str) -> DeviceMesh | None:
        communicator = self.comm((axis,))
        assert isinstance(communicator, ProcessCommunicator)
        if communicator._group is None:
            return None
        _pin(communicator._group)
        return DeviceMesh.from_group(communicator._group, self.device.type, mesh_dim_names=(axis,))

    def side_group(self, purpose: str) -> dist.ProcessGroup:
        """A gloo group of all ranks of the mesh for a thread of its own. Collective.

        The same for each ``purpose``, and freed with the context.
        """
        everyone: Partition = (tuple(sorted(self._grid.flatten().tolist())),)
        return self._group(everyone, "gloo", purpose)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._comms.clear()
        for key in self._used:
            _release(key)
        self._used.clear()

    def _make(self, axes: tuple[str, ...]) -> ProcessCommunicator:
        size, rank = self._nested(axes)
        name = "+".join(axes)
        if size == 1:
            return ProcessCommunicator(name, [self.rank], rank, self.traffic, None, self.census)
        nested = self._nested_ranks(axes)
        mine = next(ranks for ranks in nested if self.rank in ranks)
        group = self._mesh_group(axes)
        if group is None:
            group = self._group(tuple(sorted(tuple(sorted(ranks)) for ranks in nested)))
        return ProcessCommunicator(name, mine, rank, self.traffic, group, self.census)

    def _nested_ranks(self, axes: tuple[str, ...]) -> list[list[int]]:
        """Global ranks of every group along ``axes``, each in nested order."""
        names = list(self.sizes)
        rest = [name for name in names if name not in axes]
        order = [names.index(name) for name in (*rest, *axes)]
        size = self._nested(axes)[0]
        return self._grid.permute(order).reshape(-1, size).tolist()

    def _mesh_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        wide = [name for name in axes if self.sizes[name] > 1]
        if self._mesh is None or len(wide) != 1:
            return None
        return self._mesh.get_group(list(self.sizes).index(wide[0]))

    def _group(
        self, partition: Partition, backend: str = "", purpose: str = ""
    ) -> dist.ProcessGroup:
        world = dist.group.WORLD
        assert world is not None
        if not backend and partition == (tuple(range(dist.get_world_size())),):
            return world
        key = (partition, backend, purpose)
        group = _acquire(key, world, self.rank, covers_world=self._grid.numel() == world.size())
        self._used.append(key)
        return group

    def _host_group(self) -> dist.ProcessGroup:
        everyone: Partition = (tuple(sorted(self._grid.flatten().tolist())),)
        hosted = "gloo" in dist.get_backend() or "cpu:gloo" in dist.get_backend_config()
        return self._group(everyone, "" if hosted else "gloo")


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

    def _count(self, kind: str, sent: int, phase: Phase, label: str) -> None:
        super()._count(kind, sent, phase, label)
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


def _default_device() -> torch.device:
    if dist.get_backend() == "gloo":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _acquire(
    key: _Key, world: dist.ProcessGroup, rank: int, *, covers_world: bool
) -> dist.ProcessGroup:
    _forget_dead_groups()
    entry = _groups.get(key)
    if entry is None:
        partition, backend, _ = key
        mine = None
        for ranks in partition:
            # Ranks outside the mesh do not take part, so the members must meet alone there.
            if not covers_world and rank not in ranks:
                continue
            group = dist.new_group(
                list(ranks), backend=backend or None, use_local_synchronization=not covers_world
            )
            mine = group if rank in ranks else mine
        assert mine is not None
        entry = _groups[key] = _Entry(mine, world)
    entry.users += 1
    return entry.group


def _pin(group: dist.ProcessGroup) -> None:
    """Keeps a group for good: DTensor caches specs by equal meshes, whatever their groups."""
    for entry in _groups.values():
        if entry.group is group and not entry.pinned:
            entry.pinned = True
            entry.users += 1


def _release(key: _Key) -> None:
    _forget_dead_groups()
    entry = _groups.get(key)
    if entry is None:
        return
    entry.users -= 1
    if entry.users == 0:
        del _groups[key]
        dist.destroy_process_group(entry.group)


def _forget_dead_groups() -> None:
    """Drop groups of a default group that is gone: torch destroyed them with it."""
    world = dist.group.WORLD if dist.is_initialized() else None
    for key in [key for key, entry in _groups.items() if entry.world is not world]:
        del _groups[key]
