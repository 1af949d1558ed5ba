"""DeepSpeed's shardings: optimizer state (1), gradients as well (2), parameters as well (3).

Stages 1 and 2:

1. Parameters of a group lie in one flat tensor, filled up to a multiple of twice the ranks. A rank has a second copy of
   its part of it, which the optimizer steps, whatever the parameters' own format.
2. Gradients are copied into a bucket, made at the first of them: as they come (2), or when backward is over (1). A full
   bucket is flattened once more to be reduced; what is a rank's own goes into a tensor of its own.
3. The update flattens that once more, group by group.
4. Stage 2 with the optimizer's state in host memory adds up every whole gradient of which a rank has a part there, since
   more backward passes may follow, and keeps those tensors; before the update they come back one by one.

Stage 3:

5. A rank has its part of every parameter twice, and a buffer for its part of every gradient. The bucket is kept.
6. Parameters with fewer elements than a threshold stay gathered.
7. Others are gathered as modules come, and beforehand as far as the prefetch reaches. Several at once are gathered into a
   flat tensor and copied out of it, which goes when the last of them has been used.
8. A parameter that is used again within the reuse distance stays, and one whose next use prefetching has passed by.

Source: https://github.com/deepspeedai/DeepSpeed/tree/master/deepspeed/runtime/zero
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from memlab.scaleout.sharding.sharding import Flats, MemoryAccount, ModelShape, Sharding, ShardPart

# what a rank's part of a flat tensor is a multiple of, in elements
_ALIGNMENT = 2
_FP32_BYTES = 4
# offloaded gradients are normed one by one in double precision
_NORM_FACTOR = 2


class _Zero(Sharding):
    """All stages: gradients are reduced in a bucket."""

    copies_outputs = (False, True)

    def __init__(
        self, model: ModelShape, ranks: int, *, offloads: bool = False, sizes: ZeroSizes | None = None
    ) -> None:
        super().__init__(model, ranks, offloads=offloads)
        self._sizes = sizes or ZeroSizes.of(model.elements())
        self._in_bucket = self._in_bucket_bytes = 0

    @property
    def _full_bucket_bytes(self) -> int:
        trained = (self.model.parameters[number].itemsize for number in self.model.trained)
        return self._sizes.bucket * max(trained, default=_FP32_BYTES)


class Zero12(_Zero):
    """Stages 1 and 2."""

    def __init__(
        self, model: ModelShape, ranks: int, *, stage: int, offloads: bool = False, sizes: ZeroSizes | None = None
    ) -> None:
        super().__init__(model, ranks, offloads=offloads, sizes=sizes)
        self._stage = stage
        self._bucket_bytes = 0
        self._own_bytes = 0
        # of which the first rank has a part; their gradients are kept whole
        self._owned = {number for group in model.groups for number in self._first(group)}
        self._owned_bytes = model.size_bytes(self._owned)
        self._bucket_has_owned = False

    @property
    def stepped(self) -> Flats:
        return tuple(self._part(group) for group in self.model.groups)

    def add_base(self, account: MemoryAccount) -> None:
        stepped = {number for group in self.model.groups for number in group}
        others = [number for number in range(len(self.model.parameters)) if number not in stepped]
        account.add(ShardPart.PARAMETERS, self.model.size_bytes(others) + self.model.buffer_bytes + self._flat_bytes)
        account.add(ShardPart.OPTIMIZER_STATE, self._part_elements * _FP32_BYTES, host=self.offloads)
        if self.offloads:
            largest_bytes = self._largest_bytes
            account.add(ShardPart.PARAMETERS, self._part_bytes, host=True)
            account.add(ShardPart.GRADIENTS, self._part_elements * _FP32_BYTES, host=True)
            account.add(ShardPart.GRADIENTS, self._owned_bytes if self._stage == 2 else 0, host=True)
            account.add(ShardPart.BUFFERS, largest_bytes, host=True)
            account.add(ShardPart.BUFFERS, largest_bytes)

    def settled(self, account: MemoryAccount, parameter: int) -> None:
        self._need_bucket(account)
        if self._stage == 2:
            self._into_bucket(account, parameter)

    def backward_over(self, account: MemoryAccount) -> None:
        for parameter in [number for group in self.model.groups for number in group]:
            if parameter in account.gradients:
                self._into_bucket(account, parameter)
        self._reduce(account)
        account.add(ShardPart.BUFFERS, -self._bucket_bytes)
        self._bucket_bytes = 0

    def update_begins(self, account: MemoryAccount) -> None:
        if self.offloads:
            if self._stage == 2:
                account.touch(ShardPart.BUFFERS, (1 + _NORM_FACTOR) * self._largest_bytes)
            return
        account.add(ShardPart.GRADIENTS, self._part_elements * _FP32_BYTES)
        account.add(ShardPart.GRADIENTS, -self._own_bytes)

    def update_over(self, account: MemoryAccount) -> None:
        super().update_over(account)
        if not self.offloads:
            account.add(ShardPart.GRADIENTS, -self._part_elements * _FP32_BYTES)
        self._own_bytes = 0
        self.ring_bytes += self._flat_bytes

    # -- steps of it ---------------------------------------------------------------------------

    def _part(self, group: tuple[int, ...]) -> int:
        """A rank's elements of a group."""
        multiple = _ALIGNMENT * self.ranks
        return -(-self.model.elements(group) // multiple) * _ALIGNMENT

    def _first(self, group: tuple[int, ...]) -> Iterator[int]:
        """Parameters of a group of which the first rank has a part."""
        left = self._part(group)
        for number in group:
            if left <= 0:
                return
            yield number
            left -= self.model.parameters[number].elements

    @property
    def _part_elements(self) -> int:
        return sum(self._part(group) for group in self.model.groups if group)

    @property
    def _largest_bytes(self) -> int:
        return max((self.model.parameters[number].size_bytes for g in self.model.groups for number in g), default=0)

    @property
    def _part_bytes(self) -> int:
        return sum(self._part(g) * self.model.parameters[g[0]].itemsize for g in self.model.groups if g)

    @property
    def _flat_bytes(self) -> int:
        return self.ranks * self._part_bytes

    def _need_bucket(self, account: MemoryAccount) -> None:
        if not self._bucket_bytes:
            self._bucket_bytes = self._full_bucket_bytes
            account.add(ShardPart.BUFFERS, self._bucket_bytes)

    def _into_bucket(self, account: MemoryAccount, parameter: int) -> None:
        shape = self.model.parameters[parameter]
        if self._in_bucket + shape.elements > self._sizes.bucket:
            self._reduce(account)
        self._in_bucket += shape.elements
        self._in_bucket_bytes += shape.size_bytes
        self._bucket_has_owned |= parameter in self._owned
        if shape.elements <= self._sizes.bucket:
            account.drop_gradient(parameter)
        else:
            self._reduce(account, alone=parameter)

    def _reduce(self, account: MemoryAccount, alone: int | None = None) -> None:
        if not self._in_bucket:
            return
        if alone is None:
            account.touch(ShardPart.BUFFERS, self._in_bucket_bytes)
        if self.offloads and self._stage == 1:
            account.touch(ShardPart.BUFFERS, _NORM_FACTOR * self._largest_bytes)
        self.ring_bytes += 2 * self._in_bucket_bytes
        self._in_bucket = self._in_bucket_bytes = 0
        if self._bucket_has_owned and not self._own_bytes and not self.offloads:
            self._own_bytes = self._owned_bytes
            account.add(ShardPart.GRADIENTS, self._own_bytes)
        self._bucket_has_owned = False
        if alone is not None:
            account.drop_gradient(alone)


class Zero3(_Zero):
    """Stage 3."""

    keeps_parameters = True

    def __init__(
        self, model: ModelShape, ranks: int, *, offloads: bool = False, sizes: ZeroSizes | None = None
    ) -> None:
        super().__init__(model, ranks, offloads=offloads, sizes=sizes)
        self._kept = {n for n, p in enumerate(model.parameters) if p.elements < self._sizes.persistence_threshold}
        self._available: set[int] = set(self._kept)
        self._flat: dict[int, _Flat] = {}
        self._order: list[int] = []
        self._recorded: list[int] = []
        self._queue: deque[tuple[int, int]] = deque()
        self._fetched_for: dict[int, int] = {}
        self._step = 0
        self._using: dict[int, set[int]] = {}

    @property
    def stepped(self) -> Flats:
        return tuple(self._parts(group) for group in self.model.groups)

    def add_base(self, account: MemoryAccount) -> None:
        everything = tuple(range(len(self.model.parameters)))
        account.add(ShardPart.PARAMETERS, sum(self.model.parameters[n].part_bytes(self.ranks) for n in everything))
        account.add(ShardPart.PARAMETERS, self.model.buffer_bytes)
        account.add(ShardPart.GATHERED, self.model.size_bytes(self._kept))
        stepped = sum(self._parts(group) for group in self.model.groups)
        account.add(ShardPart.OPTIMIZER_STATE, stepped * _FP32_BYTES, host=self.offloads)
        account.add(ShardPart.GRADIENTS, stepped * _FP32_BYTES, host=self.offloads)
        if self.offloads:
            # gradients the optimizer is handed, beside the buffer they are gathered in
            account.add(ShardPart.GRADIENTS, stepped * _FP32_BYTES, host=True)
        account.add(ShardPart.BUFFERS, self._full_bucket_bytes)

    def forward_begins(self, account: MemoryAccount, module: int) -> None:
        wanted = self.model.modules[module]
        self._gather(
            account, [number for number in wanted if number not in self._available and number not in self._flat]
        )
        for number in wanted:
            self._using.setdefault(number, set()).add(module)
            self._take_out(account, number)
        self._recorded.append(module)
        if self._order:
            self._pass_over(wanted)
            self._prefetch(account)
        self._step += 1

    backward_begins = forward_begins

    def forward_ends(self, account: MemoryAccount, module: int) -> None:
        for number in self.model.modules[module]:
            using = self._using.get(number, set())
            using.discard(module)
            if number in self._kept or using or number not in self._available or self._is_used_soon(number):
                continue
            self._available.discard(number)
            account.add(ShardPart.GATHERED, -self.model.parameters[number].size_bytes)

    backward_ends = forward_ends

    def settled(self, account: MemoryAccount, parameter: int) -> None:
        shape = self.model.parameters[parameter]
        if self._in_bucket and self._in_bucket + shape.elements > self._sizes.bucket:
            self._reduce(account)
        self._in_bucket += shape.elements
        self._in_bucket_bytes += shape.size_bytes
        if shape.elements > self._sizes.bucket:
            self._reduce(account)
        account.drop_gradient(parameter)

    def backward_over(self, account: MemoryAccount) -> None:
        self._reduce(account)
        for flat in {id(flat): flat for flat in self._flat.values()}.values():
            account.add(ShardPart.BUFFERS, -flat.size_bytes)
        self._flat.clear()
        for number in self._available - self._kept:
            account.add(ShardPart.GATHERED, -self.model.parameters[number].size_bytes)
        self._available = set(self._kept)
        self._order, self._recorded = self._recorded, []
        self._queue = deque(
            (number, step) for step, module in enumerate(self._order) for number in sorted(self.model.modules[module])
        )
        self._fetched_for.clear()
        self._using.clear()
        self._step = 0

    def update_begins(self, account: MemoryAccount) -> None:
        account.add(ShardPart.GATHERED, -self.model.size_bytes(self._kept))
        if not self.offloads:
            account.add(ShardPart.GRADIENTS, self._largest_group_bytes)

    def update_over(self, account: MemoryAccount) -> None:
        super().update_over(account)
        if not self.offloads:
            account.add(ShardPart.GRADIENTS, -self._largest_group_bytes)
        kept_bytes = self.model.size_bytes(self._kept)
        account.add(ShardPart.GATHERED, kept_bytes)
        self.ring_bytes += kept_bytes

    # -- steps of it ---------------------------------------------------------------------------

    def _parts(self, group: tuple[int, ...]) -> int:
        return sum(-(-self.model.parameters[number].elements // self.ranks) for number in group)

    @property
    def _largest_group_bytes(self) -> int:
        return max((self._parts(group) for group in self.model.groups), default=0) * _FP32_BYTES

    @property
    def _norm_bytes(self) -> int:
        parts = (self.model.parameters[number].part_bytes(self.ranks) for number in self.model.trained)
        return _NORM_FACTOR * max(parts, default=0) if self.offloads and self.ranks > 1 else 0

    def _reduce(self, account: MemoryAccount) -> None:
        account.touch(ShardPart.BUFFERS, self._in_bucket_bytes + self._norm_bytes)
        self.ring_bytes += self._in_bucket_bytes
        self._in_bucket = self._in_bucket_bytes = 0

    def _pass_over(self, wanted: tuple[int, ...]) -> None:
        """Take what is used now off the queue, unless it was taken off when it was fetched beforehand."""
        missing = {number for number in wanted if self._fetched_for.get(number, -1) < self._step}
        while self._queue and missing:
            number, step = self._queue.popleft()
            self._fetched_for[number] = step
            missing.discard(number)

    def _prefetch(self, account: MemoryAccount) -> None:
        gathered = self.model.elements([*(self._available - self._kept), *self._flat])
        most = min(self._sizes.max_live - gathered, self._sizes.prefetch)
        chosen: list[int] = []
        elements = 0
        while self._queue and elements < most:
            number, step = self._queue.popleft()
            self._fetched_for[number] = max(self._fetched_for.get(number, -1), step)
            if number not in self._available and number not in self._flat and number not in chosen:
                chosen.append(number)
                elements += self.model.parameters[number].elements
        self._gather(account, chosen)

    def _gather(self, account: MemoryAccount, numbers: list[int]) -> None:
        if not numbers:
            return
        size_bytes = sum(self.ranks * self.model.parameters[number].part_bytes(self.ranks) for number in numbers)
        self.ring_bytes += size_bytes
        flat = _Flat(size_bytes, set(numbers), is_taken_over=len(numbers) == 1)
        account.add(ShardPart.BUFFERS, size_bytes)
        for number in numbers:
            self._flat[number] = flat

    def _take_out(self, account: MemoryAccount, number: int) -> None:
        """Finish the copies in flight: all of a flat tensor is copied when the first of it is needed."""
        flat = self._flat.pop(number, None)
        if flat is None:
            return
        if not flat.has_arrived:
            flat.has_arrived = True
            arrived_bytes = self.model.size_bytes(flat.numbers)
            if flat.is_taken_over:
                account.add(ShardPart.BUFFERS, -flat.size_bytes)
            account.add(ShardPart.GATHERED, arrived_bytes)
            self._available |= flat.numbers
        flat.waiting.discard(number)
        if not flat.waiting and not flat.is_taken_over:
            account.add(ShardPart.BUFFERS, -flat.size_bytes)

    def _is_used_soon(self, number: int) -> bool:
        if not self._order:
            return False
        if self._fetched_for.get(number, -1) > self._step:
            return True
        traversed = 0
        for module in self._order[self._step :]:
            if traversed >= self._sizes.max_reuse:
                return False
            if number in self.model.modules[module]:
                return True
            traversed += self.model.elements(self.model.modules[module])
        return False


class _Flat:
    """Parameters that are gathered together."""

    def __init__(self, size_bytes: int, numbers: set[int], *, is_taken_over: bool) -> None:
        self.size_bytes = size_bytes
        self.numbers = set(numbers)
        self.waiting = set(numbers)
        self.is_taken_over = is_taken_over
        self.has_arrived = False


_BUCKET_MOST, _PERSISTENT_MOST, _LIVE_MOST = 50_000_000, 100_000, 1_000_000_000
# DeepSpeed divides by it
_BUCKET_LEAST = 2
# of the model's elements
_BUCKET_SHARE, _PERSISTENT_SHARE = 8, 100


@dataclass(frozen=True)
class ZeroSizes:
    """Sizes that DeepSpeed is configured with, in elements.

    Its own defaults are made for models of billions: their buckets, of half a billion elements, would be most of a small
    model's memory, and parameters that are used again within a billion would never be let go of.

    Example:
        >>> ZeroSizes.of(7_000_000_000).bucket, ZeroSizes.of(80_000).bucket
        (50000000, 10000)

    Source: https://www.deepspeed.ai/docs/config-json/
    """

    bucket: int = _BUCKET_MOST  # most that are reduced at once, and gathered at once after an update
    persistence_threshold: int = _PERSISTENT_MOST  # smaller parameters stay gathered
    prefetch: int = _BUCKET_MOST  # how many are gathered beforehand
    max_live: int = _LIVE_MOST  # how many may be gathered before prefetching pauses
    max_reuse: int = _BUCKET_MOST  # parameters that are used again within so many stay

    @classmethod
    def of(cls, elements: int) -> ZeroSizes:
        """Sizes for a model."""
        bucket = min(max(elements // _BUCKET_SHARE, _BUCKET_LEAST), _BUCKET_MOST)
        bucket += bucket % 2  # the halves of a bucket are aligned
        return cls(bucket, min(elements // _PERSISTENT_SHARE, _PERSISTENT_MOST), bucket, _LIVE_MOST, bucket)

    def configuration(self, stage: int) -> dict[str, int]:
        """The same, as entries of DeepSpeed's ``zero_optimization``."""
        buckets = {"reduce_bucket_size": self.bucket, "allgather_bucket_size": self.bucket}
        if stage < 3:
            return buckets
        return {
            **buckets,
            "stage3_param_persistence_threshold": self.persistence_threshold,
            "stage3_prefetch_bucket_size": self.prefetch,
            "stage3_max_live_parameters": self.max_live,
            "stage3_max_reuse_distance": self.max_reuse,
        }
