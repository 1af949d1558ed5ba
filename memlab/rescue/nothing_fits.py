"""One paragraph for the user when memory ran out under every plan to fall back on."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from memlab.hardware.gpus import gpu_for
from memlab.plan import FIELDS, Plan
from memlab.records import Prediction
from memlab.rescue.fallback import Place, next_plans
from memlab.rescue.machine import held_by_others
from memlab.runtime.out_of_memory import PRINTED_SIZE, printed_bytes
from memlab.units import format_bytes

# labels of this many plans are read; of more, the first ones and the last
_LABELS_SHOWN = 5
# torch's CUDA allocator and memlab's CPU ledger
_CAPACITY = re.compile(rf"capacity (?:of )?{PRINTED_SIZE},? of which {PRINTED_SIZE} is free", re.IGNORECASE)
_ALLOWED = re.compile(rf"{PRINTED_SIZE} allowed")
_OF_TORCH = re.compile(
    rf"{PRINTED_SIZE} is allocated by PyTorch.*?{PRINTED_SIZE} is reserved by PyTorch but unallocated", re.DOTALL
)


@dataclass(frozen=True)
class Attempt:
    """A plan under which memory ran out."""

    step: int  # of the training, counted from 1
    place: Place  # where in the step
    plan: Plan  # in force when it did
    error: str  # text of the error
    requested_bytes: int | None  # what the allocation that failed asked for, where the text says it


@dataclass(frozen=True)
class Room:
    """Figures about the device in an allocator's error.

    Example:
        >>> Room.of("memlab CPU device out of memory. Tried to allocate 2.0 MiB. Capacity 8.0 MiB, of which 1.0 MiB is free.")
        Room(capacity_bytes=8388608, free_bytes=1048576, held_bytes=7340032, idle_bytes=0)
    """

    capacity_bytes: int  # what the device has, or what the process may use of it
    free_bytes: int  # what nobody held
    held_bytes: int  # what tensors of the process held
    idle_bytes: int = 0  # what the process's allocator held in pieces between them

    @classmethod
    def of(cls, error: str) -> Room | None:
        """Read the text of an error; None when it has no such numbers."""
        found = _CAPACITY.search(error)
        if found is None:
            return None
        capacity_bytes, free_bytes = map(printed_bytes, found.groups())
        of_torch, allowed = _OF_TORCH.search(error), _ALLOWED.search(error)
        held_bytes, idle_bytes = map(printed_bytes, of_torch.groups()) if of_torch else (capacity_bytes - free_bytes, 0)
        if allowed is not None:
            capacity_bytes = printed_bytes(allowed.group(1))
            free_bytes = min(free_bytes, max(0, capacity_bytes - held_bytes - idle_bytes))
        return cls(capacity_bytes, free_bytes, held_bytes, idle_bytes)


def nothing_fits(
    tried: Sequence[Attempt],  # every attempt in order, the last one under the plan that needs least; at least one
    no_room: Sequence[Plan] = (),  # plans that memory ran out for while they were put in force
    *,
    capacity_bytes: int | None = None,  # size of the device; by default the one in the last error's text
    predictions: Mapping[Plan, Prediction] | None = None,  # what is predicted for plans
    keep: Collection[str] = (),  # fields of the plan that were not allowed to change
    # rows of the batch, None when unknown; this and what follows tell whether a field in `keep` closes the way to
    # further plans
    rows: int | None = None,
    keeps_rows: bool = False,  # as for `next_plans`
    has_optimizer: bool = True,  # as for `next_plans`
    # whether parameters and optimizer state are as before the step; they are not when the update was done for some
    # parameters
    is_as_before: bool = True,
    elsewhere: str = "",  # where there is room beside this device, in words
) -> str:
    """Return what was tried, how far off it is, what would do, and in which state everything is.

    Example:
        >>> error = "memlab CPU device out of memory. Tried to allocate 2.0 MiB. Capacity 8.0 MiB, of which 1.0 MiB is free."
        >>> text = nothing_fits([Attempt(7, Place.FORWARD, Plan(), error, 2 * 2**20)])
        >>> for sentence in text.split(". "):
        ...     print(sentence)
        Step 7 ran out of memory under every plan there is to try: as written (in the forward pass)
        The last plan tried asked for 2.0 MiB where 1.0 MiB of 8.0 MiB was free, so it needs at least 9.0 MiB, \
1.0 MiB more than there is: any GPU has that much; where a capacity was set, raise it
        Otherwise make the batch smaller or its sequences shorter; %memfit find --budget SIZE looks for a plan that fits
        The kernel still works, and weights and optimizer state are as they were before step 7 ran out of memory.
    """
    last = tried[-1]
    room, predicted = Room.of(last.error), (predictions or {}).get(last.plan)
    closed = _closed_by(keep, last, rows, keeps_rows=keeps_rows, has_optimizer=has_optimizer)
    state = (
        # "out of memory." is what loops look for that try again with a smaller batch
        f"weights and optimizer state are as they were before step {last.step} ran out of memory"
        if is_as_before
        else f"the optimizer was in the middle of step {last.step}: load a checkpoint to go on"
    )
    return " ".join(
        (
            f"Step {last.step} ran out of memory under every plan there is to try: {_listed(tried, no_room)}.",
            f"{_asked(last.requested_bytes, room)}{_needs(last, room, capacity_bytes, predicted)}.",
            f"{_otherwise(closed)}.",
            *([f"{elsewhere}."] if elsewhere else []),
            f"The kernel still works, and {state}.",
        )
    )


def _listed(tried: Sequence[Attempt], no_room: Sequence[Plan]) -> str:
    """Plans by the place where they ran out, neighbours together; then those that could not be put in force."""
    parts = []
    for (step, place), attempts in groupby(tried, key=lambda attempt: (attempt.step, attempt.place)):
        labels = list(dict.fromkeys(attempt.plan.label for attempt in attempts))
        at_step = "" if step == tried[-1].step else f" of step {step}"
        parts.append(f"{_shortened(labels)} (in {place.words}{at_step})")
    if no_room:
        parts.append(f"{_shortened(list(dict.fromkeys(plan.label for plan in no_room)))} (no room to change plans)")
    return "; ".join(parts)


def _shortened(labels: list[str]) -> str:
    left_out = len(labels) - _LABELS_SHOWN
    if left_out > 1:
        labels = [*labels[: _LABELS_SHOWN - 2], f"{left_out} more", *labels[-2:]]
    return ", ".join(labels)


def _asked(requested_bytes: int | None, room: Room | None) -> str:
    if requested_bytes is None:
        return "How much was missing is not known, as the error names no size"
    asked = f"The last plan tried asked for {format_bytes(requested_bytes)}"
    if room is None:
        return asked
    return f"{asked} where {format_bytes(room.free_bytes)} of {format_bytes(room.capacity_bytes)} was free"


def _needs(last: Attempt, room: Room | None, capacity_bytes: int | None, prediction: Prediction | None) -> str:
    """Return what the last plan needs beyond what there is, and which GPU has it; empty when that is not known."""
    capacity_bytes = capacity_bytes or (room.capacity_bytes if room is not None else None)
    if capacity_bytes is None:
        return ""
    predicted_bytes = prediction.needed_bytes if prediction is not None and not prediction.refused else 0
    least_bytes = 0 if room is None or last.requested_bytes is None else room.held_bytes + last.requested_bytes
    if max(least_bytes, predicted_bytes) > capacity_bytes:
        if predicted_bytes > least_bytes:
            return f"; it is predicted to need {_beyond(predicted_bytes, capacity_bytes)}"
        return f", so it needs at least {_beyond(least_bytes, capacity_bytes)}"
    if room is None or last.requested_bytes is None:
        return ""
    if last.requested_bytes <= room.free_bytes + room.idle_bytes:
        return ", enough, but not in one piece: start Python with PYTORCH_ALLOC_CONF=expandable_segments:True"
    outside_bytes = capacity_bytes - room.free_bytes - room.held_bytes - room.idle_bytes
    others = held_by_others(last.error)
    named = f" ({others})" if others else ""
    return f", and {format_bytes(outside_bytes)} was held outside of PyTorch: end other programs on this device{named}"


def _beyond(needed_bytes: int, capacity_bytes: int) -> str:
    # search imports the session, which imports this
    missing = f"{format_bytes(needed_bytes - capacity_bytes)} more than there is"
    return f"{format_bytes(needed_bytes)}, {missing}: {gpu_for(needed_bytes)}"


def _otherwise(closed: Sequence[str]) -> str:
    opened = f"allow changes of {_joined(closed)} (--keep excludes further plans), " if closed else ""
    return (
        f"Otherwise {opened}make the batch smaller or its sequences shorter; %memfit find --budget SIZE looks for a plan "
        "that fits"
    )


def _joined(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _closed_by(
    keep: Collection[str], last: Attempt, rows: int | None, *, keeps_rows: bool, has_optimizer: bool
) -> list[str]:
    """Fields that were not allowed to change, and whose change would give further plans."""
    return [
        spec.name
        for spec in FIELDS
        if spec.name in keep
        and any(
            next_plans(
                last.plan,
                last.place,
                rows=rows or 2 * last.plan.accumulation,
                keep={other.name for other in FIELDS} - {spec.name},
                keeps_rows=keeps_rows,
                has_optimizer=has_optimizer,
            )
        )
    ]
