"""FSDP2's sharding: everything in shards, a block gathered while it is used.

1. A gather has a buffer of its own, and the gathered parameters are copied out of it. In the forward pass the buffer
   stays until the next block has been copied out, so that gathers overlap with work.
2. Blocks go after their forward; what belongs to none, which the outermost module gathers, stays until backward is over.
3. In the backward pass the block that comes next is gathered beforehand.
4. A block's gradients are copied into one buffer when its backward is over, and go. What is left of the reduction is the
   rank's shard. The buffer stays until the next block needs one.
5. On one rank nothing is gathered, but parameters are copied as they would be.
"""

from __future__ import annotations

from memlab.scaleout.sharding.sharding import ROOT, MemoryAccount, ModelShape, Sharding, ShardPart


class Fsdp2Sharding(Sharding):
    """`fully_shard` on every block and on the whole."""

    def __init__(self, model: ModelShape, ranks: int, *, offloads: bool = False) -> None:
        super().__init__(model, ranks, offloads=offloads)
        self._units = {ROOT: model.rest, **dict(zip(model.blocks, model.block_parameters, strict=True))}
        self._gathered: set[int] = set()
        self._buffers: dict[int, int] = {}
        self._order: list[int] = []
        self._reduced: set[int] = set()
        self._reducing_bytes = 0
        self._in_backward = False

    @property
    def stepped(self) -> float:
        return self._shard_bytes(self.model.trained) / max(1, self.model.size_bytes(self.model.trained))

    def add_base(self, account: MemoryAccount) -> None:
        account.add(ShardPart.PARAMETERS, self._shard_bytes(range(len(self.model.parameters))), host=self.offloads)
        account.add(ShardPart.PARAMETERS, self.model.buffer_bytes)

    def forward_begins(self, account: MemoryAccount, module: int) -> None:
        if module not in self._units or module in self._gathered:
            return
        self._gather(account, module)
        self._copy_out(account, module)
        for earlier in [each for each in self._buffers if each != module]:
            self._free_buffer(account, earlier)

    def forward_ends(self, account: MemoryAccount, module: int) -> None:
        if module not in self._units or self._in_backward:
            return
        self._order.append(module)
        if module == ROOT:
            for each in [*self._buffers]:
                self._free_buffer(account, each)
        else:
            self._reshard(account, module)

    def backward_begins(self, account: MemoryAccount, module: int) -> None:
        if module not in self._units:
            return
        self._in_backward = True
        if module not in self._gathered:
            self._gather(account, module)
            self._copy_out(account, module)
            self._free_buffer(account, module)
        if module in self._order and (place := self._order.index(module)) > 0:
            following = self._order[place - 1]
            if following not in self._gathered:
                self._gather(account, following)

    def backward_ends(self, account: MemoryAccount, module: int) -> None:
        if module in self._units and module != ROOT:
            self._reduce(account, module)

    def backward_over(self, account: MemoryAccount) -> None:
        for unit in [*self._units][1:]:
            if unit not in self._reduced:
                self._reduce(account, unit)
        self._reduce(account, ROOT)
        for each in [*self._buffers]:
            self._free_buffer(account, each)
        account.add(ShardPart.BUFFERS, -self._reducing_bytes)
        self._reducing_bytes, self._in_backward = 0, False
        self._order.clear()
        self._reduced.clear()

    def update_over(self, account: MemoryAccount) -> None:
        trained = [number for number in self.model.trained if number not in account.gradients]
        super().update_over(account)
        account.add(ShardPart.GRADIENTS, -self._shard_bytes(trained), host=self.offloads)

    # -- steps of it ---------------------------------------------------------------------------

    def _shard_bytes(self, numbers: range | tuple[int, ...] | list[int]) -> int:
        return sum(self.model.parameters[number].cut_bytes(self.ranks) for number in numbers)

    def _unit_bytes(self, unit: int) -> int:
        return self.ranks * self._shard_bytes(self._units[unit])

    def _gather(self, account: MemoryAccount, unit: int) -> None:
        if unit in self._buffers or unit in self._gathered:
            return
        size_bytes = self._unit_bytes(unit) if self.ranks > 1 else 0
        if self.offloads and account.has_host:
            account.touch(ShardPart.GATHERED, self._shard_bytes(self._units[unit]))
        self._buffers[unit] = size_bytes
        account.add(ShardPart.BUFFERS, size_bytes)
        self.ring_bytes += size_bytes

    def _copy_out(self, account: MemoryAccount, unit: int) -> None:
        account.add(ShardPart.GATHERED, self._unit_bytes(unit))
        self._gathered.add(unit)

    def _free_buffer(self, account: MemoryAccount, unit: int) -> None:
        account.add(ShardPart.BUFFERS, -self._buffers.pop(unit, 0))

    def _reshard(self, account: MemoryAccount, unit: int) -> None:
        if unit in self._gathered:
            self._gathered.discard(unit)
            account.add(ShardPart.GATHERED, -self._unit_bytes(unit))

    def _reduce(self, account: MemoryAccount, unit: int) -> None:
        self._reshard(account, unit)
        self._reduced.add(unit)
        account.add(ShardPart.BUFFERS, -self._reducing_bytes)
        numbers = [number for number in self._units[unit] if number in account.gradients]
        shard_bytes = self._shard_bytes(numbers)
        self._reducing_bytes = self.ranks * shard_bytes
        account.add(ShardPart.BUFFERS, self._reducing_bytes)
        for number in numbers:
            account.drop_gradient(number)
        account.add(ShardPart.GRADIENTS, shard_bytes, host=self.offloads)
        self.ring_bytes += self._reducing_bytes
