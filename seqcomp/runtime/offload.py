"""Inputs of blocks wait for their backward in host memory.

The copy to the host runs on a stream of its own, beside the block that reads the value; the copy
back of a block's input is started when the backward of the block after it starts, so that it is
there in time. Memory of the device is given back when the copy has left it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Offload:
    """The values of one rank that are on the host."""

    def __init__(self) -> None:
        self._last: weakref.ref[Waiting] | None = None
        self._known = WeakTensorKeyDictionary()  # a value that several blocks read goes once
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, values: Sequence[Any]) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which those of `values` that learn are saved on the host.

        What does not learn (tables, masks) serves every block and is saved where it is, as is all
        that is in host memory already.
        """
        chosen = {
            x.data_ptr(): x
            for x in values
            if isinstance(x, Tensor) and x.requires_grad and x.device.type != "cpu"
        }

        def pack(x: Tensor) -> Any:
            given = chosen.get(x.data_ptr())
            return x if given is None or given.shape != x.shape else self._sent(given)

        def unpack(x: Any) -> Tensor:
            return x.back() if isinstance(x, Waiting) else x

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _sent(self, x: Tensor) -> Waiting:
        found: Waiting | None = self._known.get(x)
        if found is None:
            before = self._last() if self._last is not None else None
            found = Waiting(x.detach(), self._stream(x.device), before)
            self._known[x] = found
            self._last = weakref.ref(found)
        return found

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class Waiting:
    """A value on the host. ``before`` went there before it, and comes back after it."""

    def __init__(self, x: Tensor, stream: torch.cuda.Stream, before: Waiting | None) -> None:
        self._device = x.device
        self._stream = stream
        self._before = weakref.ref(before) if before is not None else None
        self._back: Tensor | None = None
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.host.copy_(x, non_blocking=True)
        x.record_stream(stream)

    def start(self) -> None:
        """Begin the copy back, unless it has begun."""
        if self._back is None:
            with torch.cuda.stream(self._stream):
                self._back = self.host.to(self._device, non_blocking=True)

    def back(self) -> Tensor:
        """The value on its device; the current stream waits for it, not the host."""
        self.start()
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        result, self._back = self._back, None
        assert result is not None
        result.record_stream(current)
        before = self._before() if self._before is not None else None
        if before is not None:
            before.start()
        return result
