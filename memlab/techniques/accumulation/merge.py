"""Making one value of those that micro-batches gave, and finding out how, by comparing with that of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from memlab.runtime.aliases import KEEP_WHOLE
from memlab.runtime.containers import Effect
from memlab.runtime.lazy import real
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.tree import attributes, holds_tensors, runs_later, values_of

# numbers that are compared at a time
_AT_ONCE = 2**20
# values count as the same when they are as near each other as the tolerance allows for values of this size
_SMALLEST = 1e-2
# objects are held against each other to this depth
_DEEPEST = 4


class UnsettledError(Exception):
    """The rules found for a call do not say how the values of this one are combined."""


class OtherConditionsError(Exception):
    """The rules were found for calls under other conditions."""


@dataclass(frozen=True)
class Join:
    """Place where rows of parts stand one after another."""

    dim: int  # the dimension
    is_inner: bool = False  # whether it counts rows within something else, as in ``[positions · rows, classes]``

    @property
    def at(self) -> int:
        """Return the dimension of rows in what `opened` gives."""
        return self.dim + self.is_inner

    def opened(self, value: torch.Tensor, rows: int) -> torch.Tensor:
        """The same value with a dimension in which parts are joined; of so many rows."""
        return value.unflatten(self.dim, (-1, rows)) if self.is_inner else value  # type: ignore[no-untyped-call]

    def closed(self, value: torch.Tensor) -> torch.Tensor:
        """Return what `opened` was given."""
        return value.flatten(self.dim, self.at) if self.is_inner else value

    def of(self, parts: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
        """Parts one after another; parts that are shorter in other dimensions are filled up with zeros."""
        parts = [self.opened(part, count) for part, count in zip(parts, rows, strict=True)]
        longest = [max(part.size(place) for part in parts) for place in range(parts[0].dim())]
        return self.closed(torch.cat([_filled(part, longest, self.at) for part in parts], self.at))

    def share(
        self, whole: torch.Tensor, index: int, sizes: Sequence[int], rows: Sequence[int], shape: Sequence[int]
    ) -> torch.Tensor:
        """Return the part of a joined value that belongs to one part of the batch.

        Args:
            whole: the value.
            index: number of the part.
            sizes: of the parts up to this one, along `dim`.
            rows: of all parts.
            shape: of the part, which may have been filled up.
        """
        sizes = rows if self.is_inner else sizes
        share = self.opened(whole, sum(rows)).narrow(self.at, sum(sizes[:index]), sizes[index])
        share = self.closed(share)
        for dim, size in enumerate(shape):
            share = share if dim == self.dim else share.narrow(dim, 0, size)
        return share


@dataclass(frozen=True)
class Merge:
    """Rule by which values of micro-batches make the value of the batch."""

    # "same" (all have it), "join" (along a dimension), "mean" (by rows), "sum", "change" (the value before, and what
    # each changed), "largest", "smallest"
    kind: str
    join: Join = Join(0)  # of "join"
    has_graph: bool = False  # whether the value of the whole batch has a gradient
    others: tuple[Merge, ...] = ()  # ways that made the same value of the parts that were looked at
    tolerance: float = 0.0  # up to which values count as the same

    def value(self, before: Any, parts: Sequence[Any], rows: Sequence[int]) -> Any:
        """The value of the batch.

        Args:
            before: what was there before the call, for "change".
            parts: one value of each micro-batch.
            rows: how many each has.

        Raises:
            UnsettledError: the ways that were left open give different values here.
        """
        value = self._value(before, parts, rows)
        same = parts if self.kind == "same" else ()
        for other in (*same, *(merge._value(before, parts, rows) for merge in self.others)):
            if not agree(other, value, self.tolerance):
                raise UnsettledError
        return value

    def _value(self, before: Any, parts: Sequence[Any], rows: Sequence[int]) -> Any:
        if self.kind == "join":
            return self.join.of(parts, rows)
        if self.kind == "mean":
            return sum(part * (count / sum(rows)) for part, count in zip(parts, rows, strict=True))
        if self.kind == "sum":
            return _sum(parts)
        if self.kind == "change":
            return before + _sum([part - before for part in parts])
        if self.kind in ("largest", "smallest") and isinstance(parts[0], torch.Tensor):
            return torch.stack([*parts]).amax(0) if self.kind == "largest" else torch.stack([*parts]).amin(0)
        if self.kind in ("largest", "smallest"):
            return max(parts) if self.kind == "largest" else min(parts)
        return parts[-1]

    def weights(self, rows: Sequence[int]) -> list[float] | None:
        """Return what each part weighs, where the value is a weighted sum that may be derived."""
        if self.kind == "sum":
            return [1.0] * len(rows)
        return [count / sum(rows) for count in rows] if self.kind == "mean" else None


def found_merge(before: Any, parts: Sequence[Any], whole: Any, rows: Sequence[int], tolerance: float) -> Merge | None:
    """Return how these parts make this whole; None when in no way that is known."""
    # each with how far it is off: small changes of large values are within the tolerance of several
    found: list[tuple[float, Merge]] = []
    is_array = is_ndarray(whole)
    if is_array and all(map(is_ndarray, parts)) and whole.dtype.kind in "fiu":
        # NumPy's numbers are held against each other as tensors, and put together as what they are
        before, whole = before if before is None else torch.from_numpy(before), torch.from_numpy(whole)
        parts = [torch.from_numpy(part) for part in parts]
    if isinstance(whole, torch.Tensor):
        if not all(isinstance(part, torch.Tensor) for part in parts):
            return None
        parts = [real(part).detach() for part in parts]
        before = before.detach() if isinstance(before, torch.Tensor) else None
        graph = whole.requires_grad
        whole = real(whole).detach()
        if all(close(part, whole, tolerance) for part in parts):
            # what has a gradient is taken as a mean, which is the same, so that each part has its share of it
            same = (max(distance(part, whole) for part in parts), Merge("same", tolerance=tolerance))
            found += [] if graph else [same]
        join = found_join(whole, parts, rows, tolerance)
        if join is not None:
            return Merge("join", join, has_graph=graph, tolerance=tolerance)
        kinds = ["mean", "sum"] if whole.is_floating_point() else ["sum"]
        if not (graph or is_array or whole.is_complex()):
            kinds += ["largest", "smallest"]
        if any(part.shape != whole.shape for part in parts):
            return None
    else:
        graph = False
        is_number = not isinstance(whole, bool) and all(isinstance(each, (int, float)) for each in (whole, *parts))
        if all(agree(part, whole, tolerance) for part in parts):
            off = max(abs(part - whole) for part in parts) if is_number else 0.0
            found.append((off, Merge("same", tolerance=tolerance)))
        if not is_number:
            return found[0][1] if found else None
        kinds = ["mean", "sum", "largest", "smallest"]
    if (
        not graph
        and before is not None
        and (before.shape == whole.shape if isinstance(before, torch.Tensor) else isinstance(before, (int, float)))
    ):
        kinds.insert(1, "change")
    for kind in kinds:
        merge = Merge(kind, has_graph=graph, tolerance=tolerance)
        value = merge._value(before, parts, rows)
        if close(value, whole, tolerance):
            found.append((distance(value, whole) if isinstance(whole, torch.Tensor) else abs(value - whole), merge))
    merges = [merge for _, merge in sorted(found, key=lambda each: each[0])]
    return replace(merges[0], others=tuple(merges[1:])) if merges else None


def why_apart(
    name: str,
    of: str,
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor],
    rows: Sequence[int],
    join: Join,
    tolerance: float,
) -> tuple[str, str]:
    """Return why parts of an output do not make the whole, and what to do instead."""
    whole, parts = real(whole).detach(), [real(part).detach() for part in parts]
    if len({part.dim() for part in (whole, *parts)}) == 1:
        for dim in range(whole.dim()):
            shortest = min(part.size(dim) for part in parts)
            short = [part.narrow(dim, 0, shortest) for part in parts]
            is_longest = max(part.size(dim) for part in parts) == whole.size(dim) > shortest
            if is_longest and found_join(whole.narrow(dim, 0, shortest), short, rows, tolerance):
                return (
                    f"{name} of {of} is as long in dimension {dim} as the longest row it is given, and not zero beyond others",
                    f"give it one length (`total_length=` of pad_packed_sequence), or {KEEP_WHOLE}",
                )
    off = f", for {[*parts[0].shape]} of its first rows"
    with suppress(RuntimeError, IndexError):
        off = f" is {distance(join.of(parts, rows), whole):.2g} of its size off, allowed {tolerance:.0e}"
    return (
        f"rows of a batch depend on each other in {of}: run apart they give another result than together ({name}{off})",
        KEEP_WHOLE,
    )


def agree(one: Any, other: Any, tolerance: float) -> bool:
    """Return whether two values of any kind are the same, numbers to a tolerance."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and close(one, other, tolerance)
    if is_ndarray(one) and is_ndarray(other) and one.shape == other.shape and one.dtype.kind in "fiu":
        return close(torch.from_numpy(one), torch.from_numpy(other), tolerance)
    if all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (one, other)):
        return close(one, other, tolerance)
    return equal(one, other)


@dataclass(frozen=True)
class Chain:
    """Plain items that a forward has appended to a list, taken as one value."""

    items: tuple[Any, ...]

    @classmethod
    def of(cls, chains: Sequence[Chain], merges: Sequence[Merge] | None, rows: Sequence[int]) -> Chain:
        """Return those of the batch: one after another, or item by item where there are merges."""
        if merges is None or any(len(chain.items) != len(merges) for chain in chains):
            return cls(tuple(item for chain in chains for item in chain.items))
        return cls(
            tuple(
                merge.value(None, [chain.items[place] for chain in chains], rows) for place, merge in enumerate(merges)
            )
        )


def closed(effect: Effect) -> Any:
    """The value of an effect, plain items of lists taken together."""
    if effect.kind == "appended" and not any(holds_tensors(item) for item in effect.value):
        return Chain(tuple(effect.value))
    return effect.value


def opened(value: Any) -> Any:
    """Return what `closed` was given."""
    return [*value.items] if isinstance(value, Chain) else value


def is_ndarray(value: Any) -> bool:
    """Return whether a value is an array of NumPy's, which is not imported for that."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _sum(parts: Sequence[Any]) -> Any:
    return torch.stack([*parts]).sum(0) if isinstance(parts[0], torch.Tensor) else sum(parts)


def equal(one: Any, other: Any) -> bool:
    """Return whether two plain values are the same; objects that cannot tell are when they are of one type and hold the same."""
    return first_difference(one, other) is None


def first_difference(one: Any, other: Any, place: str = "") -> tuple[str, Any, Any] | None:
    """Return where two plain values differ, and what stands there in each.

    Example:
        >>> first_difference((1, 2), (1, 2)), first_difference(1, 2)
        (None, ('', 1, 2))
    """
    different = place, one, other
    if type(one) is not type(other):
        return different
    try:
        if one is other or bool(one == other):
            return None
    except (ValueError, RuntimeError, TypeError):  # what compares element by element, or not at all
        return None if repr(one) == repr(other) else different
    if "__eq__" in vars(type(one)) or isinstance(one, (int, float, str)) or runs_later(one):
        return different
    mine, others = attributes(one), attributes(other)
    if mine.keys() != others.keys() or place.count(".") > _DEEPEST:
        return different
    found = (first_difference(value, others[name], f"{place}.{name}") for name, value in mine.items())
    return next(filter(None, found), None)


def _filled(part: torch.Tensor, longest: Sequence[int], dim: int) -> torch.Tensor:
    missing = [0 if place == dim else longest[place] - part.size(place) for place in range(part.dim())]
    if not any(missing):
        return part
    return F.pad(part, [amount for each in reversed(missing) for amount in (0, each)])


def found_join(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], rows: Sequence[int], tolerance: float
) -> Join | None:
    """Return where the parts have to be joined to make the whole; None where nowhere."""
    for dim, is_inner in product(range(whole.dim()), (False, True)):
        if any(part.dim() != whole.dim() for part in parts) or sum(part.size(dim) for part in parts) != whole.size(dim):
            continue
        join = Join(dim, is_inner)
        try:
            value = join.of(parts, rows)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            continue
        if close(value, whole, tolerance):
            return join
    return None


def close(one: Any, other: Any, tolerance: float) -> bool:
    """Return whether two values agree to a share of the size of the second."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    if not isinstance(one, torch.Tensor):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-6)
    if one.shape != other.shape or one.layout != other.layout:
        return False
    return distance(one, other) <= tolerance


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference as a share of the largest value of the second; infinite where one is not finite and the other is.

    Tensors without values do not differ.
    """
    if isinstance(one, FakeTensor) or isinstance(other, FakeTensor) or one.is_meta or other.is_meta:
        return 0.0
    one, other = values_of(one).reshape(-1), values_of(other).reshape(-1)
    if one.is_complex():
        one, other = torch.view_as_real(one).reshape(-1), torch.view_as_real(other).reshape(-1)
    if not one.is_floating_point():
        return 0.0 if bool((one == other).all()) else math.inf
    apart = size = 0.0
    for piece, reference in zip(torch.split(one, _AT_ONCE), torch.split(other, _AT_ONCE), strict=True):
        furthest, largest = _apart(piece, reference)
        apart, size = max(apart, furthest), max(size, largest)
    return apart / max(size, _SMALLEST)


def _apart(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """The largest difference of two pieces, and the largest value of the second."""
    if not one.numel():
        return 0.0, 0.0
    wide = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    one, other = one.to(wide), other.to(wide)
    finite = other.isfinite()
    if not bool(torch.where(finite, one.isfinite(), (one == other) | (one.isnan() & other.isnan())).all()):
        return math.inf, 0.0
    zero = torch.zeros((), dtype=wide, device=one.device)
    found = torch.stack(
        [torch.where(finite, one - other, zero).abs().max(), torch.where(finite, other, zero).abs().max()]
    )
    furthest, largest = found.tolist()
    return furthest, largest
