"""`save_snapshot`: two steps as a file that torch's memory viewer opens, predicted, or recorded by torch on a GPU.

In a predicted file, what each storage is for, what runs when it is born, and which stretch of which step that is, stand in
its frames, where the viewer shows a stack trace; the category by itself is its user metadata. External annotations
say what the file shows and where its stretches begin and end.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from memlab.allocator import Allocator, Context, Settings, memory_viz
from memlab.errors import MemlabError
from memlab.hardware.gpus import Gpu
from memlab.measuring.observation import PHASES
from memlab.measuring.runs import rehearsal, training_step
from memlab.plan import Plan
from memlab.predicting.plan_predictor import Parts, PlanPredictor
from memlab.predicting.reserved import Events, Player, play_steps, script_of
from memlab.predicting.segments import CATEGORIES, OUTSIDE, Event, Segment
from memlab.records import Phase
from memlab.runtime.batch import Batch
from memlab.runtime.observer import Observer
from memlab.runtime.workload import Workload

_STEPS = 2
_NO_ALLOCATOR = (
    "a CPU has no caching allocator: storages are laid out as torch's CUDA allocator would with its default settings"
)
# told on the training thread only: a split batch runs its backward passes within the model's call
_OUTSIDE = "memlab: outside of model and optimizer"
# a recorder that is never switched off would otherwise grow without end; some 40 000 entries are a step of GPT-2 XL
_MOST_ENTRIES = 2_000_000


def save_snapshot(
    path: str | Path,
    workload: Workload,
    plan: Plan | str = "",
    device: str | Gpu | None = None,
    *,
    measured: bool = False,
) -> Path:
    """Save what two steps do to memory, for https://docs.pytorch.org/memory_viz and `torch.cuda._memory_viz`.

    The first step creates the optimizer's state (unless there is some already), the second is like all that follow.

    Args:
        path: file to write; one that exists is replaced.
        workload: with an optimizer and a batch (and a `loss_fn` when the model returns no loss).
        plan: a plan, or its flags.
        device: a GPU of the catalogue to predict it for, or its name; by default the device the model is on.
        measured: on a GPU, run the steps and put everything back afterwards; the file is torch's own recording.

    Raises:
        MemlabError: the folder does not exist, no such GPU, or a measured snapshot on a CPU, or of a device the model is not on.
        RefusalError: a technique of the plan does not apply.
        TraceError: what the model computes depends on values; on a GPU `measured=True` still works.
        WorkloadError: no batch or no optimizer, or the model gives no loss.
        torch.OutOfMemoryError: measured, and the plan does not fit.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(512, 512)
        >>> workload = Workload(model, torch.optim.SGD(model.parameters()), batch=(torch.zeros(64, 512),))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = save_snapshot(f"{folder}/step.pickle", workload, "--accumulate 2", "T4")
        ...     sorted(pickle.loads(saved.read_bytes()))
        ['allocator_settings', 'device_traces', 'external_annotations', 'segments']

    Known limitations:
        On CUDA deaths carry the time at which the storage was given up, when work may still be queued. The predicted
        steps do not show what the user's loop itself keeps between steps.
    """
    target = _writable(path)
    wanted = Plan.of(plan)
    if measured:
        _require_recordable(workload, device)
        _record_on_cuda(target, workload, wanted)
    else:
        target.write_bytes(pickle.dumps(_predicted(workload, wanted, device)))
    return target


def _writable(path: str | Path) -> Path:
    target = Path(path).expanduser()
    if not target.parent.is_dir():
        raise MemlabError(f"snapshot {str(path)!r}: there is no folder {target.parent}; make it first")
    if target.is_dir():
        raise MemlabError(f"snapshot {str(path)!r}: that is a folder; name a file in it")
    return target


def _require_recordable(workload: Workload, device: str | Gpu | None) -> None:
    if workload.device.type != "cuda":
        raise MemlabError(
            f"a measured snapshot is what torch's allocator for GPUs records, and the model is on {workload.device}: ask for a "
            f"predicted one"
        )
    if device is None or (isinstance(device, str) and device.strip().casefold() == workload.device.type):
        return
    name = device if isinstance(device, str) else device.name
    raise MemlabError(
        f"a measured snapshot is of the device the model is on ({workload.device}), not of {name}: leave out the "
        f"device, or ask for a predicted one"
    )


# -- predicted --------------------------------------------------------------------------------------


def _predicted(workload: Workload, plan: Plan, device: str | Gpu | None) -> dict[str, Any]:
    predictor = PlanPredictor(workload, device)
    target, parts = predictor.target, predictor.parts(plan)
    words = f"memlab: {plan.label}, predicted for {target.name}"
    history = _History(words if target.settings else f"{words}; {_NO_ALLOCATOR}", target.settings or Settings(), parts)
    play_steps(script_of(parts, target.workspaces), history)
    return history.memory_viz()


class _History(Player):
    """Plays two steps with their predicted times and with labels, for the allocator's history."""

    def __init__(self, words: str, settings: Settings, parts: Parts) -> None:
        super().__init__(Allocator(settings, history=True))
        self._words = words
        self._segments = [*parts.segments, *([] if parts.once is None else [parts.once])]
        self._names = [*_names_of(parts.segments), "look at a few rows"]
        self._stretch = 0
        self._within = "before the first step"
        self._stretches: list[tuple[str, float]] = []
        self._seconds = 0.0

    def begin(self, step: int, stretch: int) -> None:
        self._stretch, name = stretch, self._names[stretch]
        self._within = f"step {step + 1} · {name}" if stretch >= 0 else name
        self._stretches.append((self._within, self._seconds))

    def play(self, events: Iterable[Event], live: dict[int, Any]) -> None:
        listed = list(events)
        begin, seconds = self._seconds, self._segments[self._stretch].seconds
        super().play(self._in_time(listed, begin, seconds / max(1, len(listed))), live)
        self._now(begin + seconds)

    def born(self, size_bytes: int, place: int, moment: int = OUTSIDE) -> Any:
        category, phase = str(CATEGORIES[place]), PHASES[moment]
        name = category if phase is Phase.OTHER else f"{category} · {phase}"
        return self._allocator.malloc(size_bytes, context=Context((name, self._within, self._words), category))

    def memory_viz(self) -> dict[str, Any]:
        """Return what was noted, as the viewer's dictionary."""
        return {**memory_viz(self._allocator), "external_annotations": list(self._annotations())}

    def _in_time(self, events: Events, begin: float, per_event: float) -> Iterator[Event]:
        for at, event in enumerate(events):
            self._now(begin + at * per_event)
            yield event

    def _now(self, seconds: float) -> None:
        self._seconds = seconds
        self._allocator.set_time(seconds)

    def _annotations(self) -> Iterator[dict[str, Any]]:
        yield _annotation(self._words, "START", 0.0)
        ends = [begin for _, begin in self._stretches[1:]] + [self._seconds]
        for (within, begin), end in zip(self._stretches, ends, strict=True):
            yield _annotation(within, "START", begin)
            yield _annotation(within, "END", end)
        yield _annotation(self._words, "END", self._seconds)


def _annotation(name: str, stage: str, seconds: float) -> dict[str, Any]:
    return {"name": name, "stage": stage, "device": 0, "time_us": round(seconds * 1_000_000)}


def _names_of(segments: Sequence[Segment]) -> list[str]:
    """Return what the stretches of a step are called: one alone is the whole step."""
    if len(segments) == 1:
        return ["forward, backward and update"]
    passes = [
        number
        for number, segment in enumerate(segments[:-1])
        if any(PHASES[e[3]] is Phase.BACKWARD for e in segment.events)
    ]
    names = ["outputs put together"] * (len(segments) - 1)
    for place, number in enumerate(passes, 1):
        names[number] = f"micro-batch {place} of {len(passes)}" if len(passes) > 1 else "forward and backward"
    return [*names, "update"]


# -- recorded on CUDA ------------------------------------------------------------------------------


def _record_on_cuda(target: Path, workload: Workload, plan: Plan) -> None:
    """Torch's own recording of two real steps; what ran is each allocation's user metadata."""
    with rehearsal(workload, plan) as session, torch.cuda.device(workload.device):
        watch = _MetadataObserver()
        session.observers.only([watch])
        with _recording():
            try:
                for _ in range(_STEPS):
                    training_step(workload)
            finally:
                watch.close()
            torch.cuda.synchronize(workload.device)
            torch.cuda.memory._dump_snapshot(str(target))  # type: ignore[no-untyped-call] # unannotated in torch


@contextmanager
def _recording() -> Iterator[None]:
    """Have torch record what its allocator does, from nothing on.

    Raises:
        MemlabError: somebody records already, whose history this would mix with or end.
    """
    is_on = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if is_on is not None and is_on():
        raise MemlabError(
            "torch records memory history already, and this would end it: call "
            "torch.cuda.memory._record_memory_history(None) first"
        )
    torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=_MOST_ENTRIES)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


class _MetadataObserver(Observer):
    """Writes what runs into the user metadata of allocations, where this torch has any."""

    def __init__(self) -> None:
        self._set = getattr(torch.cuda.memory, "_set_memory_metadata", None)
        get = getattr(torch.cuda.memory, "_get_memory_metadata", None)
        self._before: str = get() if get is not None else ""

    def _write(self, text: str) -> None:
        if self._set is not None:
            self._set(text)

    def forward_begins(self, batch: Batch) -> None:
        self._write("memlab: within the model's call")

    def forward_ended(self, loss: torch.Tensor | None) -> None:
        self._write(_OUTSIDE)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._write("memlab: within the optimizer's step")

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self._write(_OUTSIDE)

    def close(self) -> None:
        """Put back what the metadata was."""
        self._write(self._before)
