"""What a cell puts on record: names of its models, title, rows, notes and events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from memlab.errors import MemlabError
from memlab.measuring.runs import row_of_failure
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.records import Measurement
from memlab.runtime.batch import Batch
from memlab.runtime.namespace import name_of
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.workload import Workload, describe_all
from memlab.session import Session


def tell_apart(workload: Workload, others: Sequence[Workload], variables: Callable[[], Mapping[str, Any]]) -> None:
    """Name models: from the second one on, each is called as it is in the notebook."""
    if not others:
        return
    for each in (*others, workload) if len(others) == 1 else (workload,):
        if each.name == type(each.model).__name__:
            each.name = name_of(each.model, variables())
    alike = [each.name for each in others if each.name.partition(" #")[0] == workload.name]
    if alike:
        workload.name = f"{workload.name} #{len(alike) + 1}"


def notes_of(sessions: Sequence[Session]) -> tuple[str, ...]:
    """Return the notes of techniques, each once; one that is not true of all models with the names of its own."""
    told = {note: [each.workload.name for each in sessions if note in each.notes] for s in sessions for note in s.notes}
    return tuple(note if len(of) == len(sessions) else f"{', '.join(of)}: {note}" for note, of in told.items())


def events_of(sessions: Sequence[Session], log_from: Sequence[int]) -> tuple[str, ...]:
    """Return in words the actions on the models since their logs had so many entries."""
    return tuple(
        f"{each.workload.name}: {entry}" if len(sessions) > 1 else str(entry)
        for each, before in zip(sessions, log_from, strict=True)
        for entry in each.log[before:]
    )


def title_of(sessions: Sequence[Session], batch: Batch | None, device: str, steps: int) -> str:
    """Return models, optimizers, the shape of a batch, the device and how many steps there were, in words."""
    sizes = next((tensor.shape for tensor in (batch.tensors if batch is not None else ()) if tensor.dim()), ())
    if batch is not None and sizes and batch.rows != sizes[0]:
        sizes = (batch.rows, *sizes)  # a list, of which the first is so large
    called_with = [f"batch {' × '.join(map(str, sizes))}"] if sizes else []
    counted = f"{steps} step{'' if steps == 1 else 's'}"
    described = describe_all([each.workload for each in sessions])
    return " · ".join(["memfit", described, *called_with, device, counted])


def measurements_of(
    meter: Meter, plans: Sequence[Plan], notes: tuple[str, ...], last: Plan, error: BaseException | None
) -> list[Measurement]:
    """Return what was measured under each plan; one that ran out of memory gets a row that says so."""
    found: list[Measurement] = []
    for plan in plans:
        with suppress(MemlabError):  # the plan was in force, but no step ended under it
            found.append(meter.measurement(plan))
    if found and notes:
        found[-1] = replace(found[-1], notes=(*found[-1].notes, *notes))
    if error is not None and is_out_of_memory(error):
        found = [each for each in found if each.plan != last.label]
        found.append(row_of_failure(last, meter.device, str(error)))
    return found
