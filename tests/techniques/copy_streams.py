"""`CopyStreams` that copy as late, or as early, as streams may: to see whether somebody counts on more than they promise."""

from __future__ import annotations

import random
import weakref
from collections import deque

import torch

from memlab.techniques.offload.transfers import CopyStreams, Ticket


class _Copy:
    """A copy that has been asked for. It holds no memory, as a stream does not."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, after: _Copy | None) -> None:
        self.after, self.is_done = after, False
        self._ends = [(weakref.ref(t.untyped_storage()), t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (target, source)]  # fmt: skip

    def run(self) -> None:
        target, source = (self._seen(*end) for end in self._ends)
        with torch.no_grad():
            target.copy_(source)
        self.is_done = True

    def _seen(self, storage, shape, stride, offset, dtype) -> torch.Tensor:  # type: ignore[no-untyped-def]
        alive = storage()
        assert alive is not None, "memory was given back while a copy to or from it was under way"
        return torch.empty(0, dtype=dtype).set_(alive, offset, shape, stride)


class LateCopyStreams(CopyStreams):
    """Runs copies when it must, and now and then before.

    Args:
        luck: decides when.

    Attributes:
        log: what was asked for and what was run, in order.
        most_under_way: copies that were waiting at once.
    """

    def __init__(self, luck: random.Random) -> None:
        self._luck = luck
        self._streams: dict[str, deque[_Copy]] = {"out": deque(), "in": deque()}
        self.log: list[str] = []
        self.most_under_way = 0

    def send(self, target: torch.Tensor, source: torch.Tensor, *, reused: bool = False) -> Ticket:
        after = self._streams["in"][-1] if reused and self._streams["in"] else None
        return self._ask("out", target, source.detach(), after)

    def fetch(self, target: torch.Tensor, source: torch.Tensor, after: _Copy | None = None) -> Ticket:
        return self._ask("in", target, source, after)

    def wait(self, ticket: Ticket) -> None:
        if ticket.left is not None:
            self._run(ticket.left)

    def arrived(self, ticket: Ticket) -> None:
        self.wait(ticket)

    def settle(self) -> None:
        for stream in self._streams.values():
            while stream:
                self._run(stream[-1])

    def _ask(self, name: str, target: torch.Tensor, source: torch.Tensor, after: _Copy | None) -> Ticket:
        # until it is written nobody may count on what is in there
        with torch.no_grad():
            target.view(torch.uint8).fill_(0xFF) if target.is_contiguous() else target.fill_(float("nan"))
        copy = _Copy(target, source, after)
        self._streams[name].append(copy)
        self.log.append(f"ask {name}")
        self.most_under_way = max(self.most_under_way, sum(map(len, self._streams.values())))
        while self._luck.random() < 0.3 and any(self._streams.values()):
            stream = self._luck.choice([stream for stream in self._streams.values() if stream])
            self._run(stream[0])
        return Ticket(target, source, self, copy)

    def _run(self, copy: _Copy) -> None:
        """Run a copy, and before it those it comes after: of its stream, and the one it names."""
        if copy.is_done:
            return
        name = next(name for name, stream in self._streams.items() if copy in stream)
        while not copy.is_done:
            first = self._streams[name][0]
            if first.after is not None:
                self._run(first.after)
            first.run()
            self._streams[name].popleft()
            self.log.append(f"run {name}")
