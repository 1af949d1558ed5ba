"""Copies to and from host memory that run beside the computation: two streams, one out and one in.

Rules:

1. Each direction has a stream of its own. Work on the device's current stream is *the computation* here; the host never
   waits in `send`, `fetch` and `wait`, only in `settle` and `arrived`.
2. A copy starts when the computation has come to where it was asked for: what it reads is written by then, and what
   it writes nobody reads any more.
3. Whatever a copy reads or writes is held by its `Ticket`. A ticket may be dropped once the computation has been made
   to wait for it; not before, or the memory would be given to somebody else while the copy runs. (`release` allows it
   by `Tensor.record_stream`, but then memory comes back at times nobody can predict.)
4. A region of a pool that is used again was last written by the stream out, which keeps its order, or read by the
   stream in, which `send(…, reused=True)` waits for.
5. On the CPU, where a backend has no streams, and for tensors without values, a copy is made there and then, and waiting is nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memlab.runtime import accelerator


@dataclass(frozen=True, eq=False, slots=True)
class Ticket:
    """A copy that was asked for."""

    target: torch.Tensor  # where to
    source: torch.Tensor  # where from
    streams: CopyStreams  # that it takes
    left: Any = None  # what says that it is done; None when it was made at once

    def wait(self) -> torch.Tensor:
        """Make the computation wait for the copy, and return the target; the host goes on."""
        self.streams.wait(self)
        return self.target

    def arrived(self) -> torch.Tensor:
        """Make the host wait for the copy, to read the target, which is returned."""
        self.streams.arrived(self)
        return self.target


class CopyStreams:
    """Copies made at once; `SideStreams` makes them beside the computation.

    Example:
        >>> streams = CopyStreams()
        >>> streams.send(torch.empty(2), torch.ones(2)).wait()
        tensor([1., 1.])
    """

    def send(self, target: torch.Tensor, source: torch.Tensor, *, reused: bool = False) -> Ticket:
        """Copy off the device.

        Args:
            target: in pinned host memory.
            source: on the device; not to be written to until the computation has waited for the ticket.
            reused: the target's memory may have been read by the stream in before.
        """
        with torch.no_grad():
            target.copy_(source.detach())
        return Ticket(target, source, self)

    def fetch(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> Ticket:
        """Copy to the device.

        Args:
            target: on the device, not read or written until the computation has waited for the ticket.
            source: in pinned host memory.
            after: what says that the copy is done that writes the source, when there is one under way.
        """
        with torch.no_grad():
            target.copy_(source)
        return Ticket(target, source, self)

    def release(self, ticket: Ticket) -> None:
        """Keep what a copy reads or writes on the device until it is done, whoever drops its ticket before."""

    def wait(self, ticket: Ticket) -> None:
        """See `Ticket.wait`."""

    def arrived(self, ticket: Ticket) -> None:
        """See `Ticket.arrived`."""

    def settle(self) -> None:
        """Make the host wait for all copies."""


class SideStreams(CopyStreams):
    """Two streams of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = accelerator.new_stream(device), accelerator.new_stream(device)

    def send(self, target: torch.Tensor, source: torch.Tensor, *, reused: bool = False) -> Ticket:
        self._out.wait_stream(accelerator.current_stream(self._device))
        if reused:
            self._out.wait_stream(self._in)
        return self._copied(self._out, target, source.detach())

    def fetch(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> Ticket:
        # the target was allocated in the computation's order, so its memory may be in use there
        self._in.wait_stream(accelerator.current_stream(self._device))
        if after is not None:
            self._in.wait_event(after)
        return self._copied(self._in, target, source)

    def release(self, ticket: Ticket) -> None:
        if accelerator.is_accelerator(ticket.target.device):
            ticket.target.record_stream(self._in)
        else:
            ticket.source.record_stream(self._out)

    def wait(self, ticket: Ticket) -> None:
        if ticket.left is not None:
            accelerator.current_stream(self._device).wait_event(ticket.left)

    def arrived(self, ticket: Ticket) -> None:
        if ticket.left is not None:
            ticket.left.synchronize()

    def settle(self) -> None:
        self._out.synchronize()
        self._in.synchronize()

    def _copied(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        with accelerator.in_stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
            return Ticket(target, source, self, stream.record_event())


class Leaving:
    """Tensors on their way out, held until they have left, up to a number of bytes.

    Example:
        >>> streams = CopyStreams()
        >>> leaving = Leaving()
        >>> for _ in range(3):
        ...     leaving.add(streams.send(torch.empty(2), torch.ones(2)))
        >>> leaving.held_bytes
        24
        >>> leaving.retire(16)
        >>> leaving.held_bytes
        16
    """

    def __init__(self) -> None:
        self._tickets: deque[Ticket] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors that are held."""
        # counted anew: two counts could differ after an error
        return sum(ticket.source.nbytes for ticket in self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Hold one more, until it has left."""
        self._tickets.append(ticket)

    def retire(self, most_bytes: int) -> None:
        """Let the oldest go until no more than so many bytes are held."""
        while self.held_bytes > most_bytes:
            self._tickets[0].wait()
            self._tickets.popleft()

    def holds(self, target: torch.Tensor) -> bool:
        """Return whether a tensor is still held that is on its way to a target."""
        return any(ticket.target is target for ticket in self._tickets)

    def take_back(self, target: torch.Tensor) -> torch.Tensor | None:
        """The tensor that is on its way to a target, if it is still held; held no longer, once its copy is waited for."""
        for at, ticket in enumerate(self._tickets):
            if ticket.target is target:
                ticket.wait()
                del self._tickets[at]
                return ticket.source
        return None


_at_once = CopyStreams()
_side_streams: dict[torch.device, CopyStreams] = {}


def copy_streams_of(tensor: torch.Tensor) -> CopyStreams:
    """The streams of the device a tensor is on.

    Example:
        >>> type(copy_streams_of(torch.ones(1))).__name__
        'CopyStreams'
    """
    return copy_streams_for(tensor, tensor.device)


def copy_streams_for(tensor: torch.Tensor, device: torch.device) -> CopyStreams:
    """The streams of the device a tensor is used on, wherever it rests."""
    if isinstance(tensor, FakeTensor) or not accelerator.has_streams(device):
        return _at_once
    if device not in _side_streams:
        _side_streams[device] = SideStreams(device)
    return _side_streams[device]


def settle() -> None:
    """Make the host wait for all copies in all streams, to read host memory or to give it back."""
    for streams in _side_streams.values():
        streams.settle()
