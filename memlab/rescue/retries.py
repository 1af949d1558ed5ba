"""Retries of the caching allocator: noticed from its counters, said once, with the advice that fits.

A request for which there is no room makes torch's allocator wait for the device, give its whole cache back to the
driver and ask once more (`num_alloc_retries`). When that works nobody notices, but a step which does it again and
again takes a multiple of its time. Two causes look the same from outside:

- *Fragmentation*: what is free is cached in pieces of the wrong sizes, as with batches of mixed lengths. At the peak the
  allocator holds much more than the tensors need. Expandable segments, which grow and shrink in place, cure it.
- *Too little memory*: nearly all it holds are tensors. Smaller micro-batches cure it.

On Windows, and in WSL, neither shows: a GPU that is full goes on in the memory of the host, and steps get slow. There the
allocator's hold of nearly the whole GPU is what is said.

Fragmentation can be told from the two peaks of a step: at the moment of a retry, tensors and the request together are
at most the allocated peak, and the allocator has reached all it can get, the reserved peak.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from memlab.allocator import Settings
from memlab.allocator.settings import VARIABLES
from memlab.plan import Plan
from memlab.plan.savings import more_micro_batches
from memlab.rescue.machine import is_shared_with_windows
from memlab.runtime import accelerator
from memlab.runtime.observer import Observer
from memlab.techniques.base import process_count
from memlab.units import MIB, exact_size, format_bytes

# share of what the allocator holds at the peak; below it, rounding and caching explain what is idle
_IDLE_SHARE = 0.1
# share of a GPU that a process holds when Windows begins to give it memory of the host
_NEARLY_ALL = 0.9
# a single step with retries may be a warm-up, an evaluation in between, or one long batch
_STEPS_IN_A_ROW = 2
_COUNTER, *_PEAKS = "num_alloc_retries", "allocated_bytes", "reserved_bytes"


Expand = Callable[[Settings], str | None]


@dataclass(frozen=True)
class AllocatorSample:
    """The allocator's counters so far.

    Example:
        >>> AllocatorSample.of({"num_alloc_retries": 2, "allocated_bytes.all.peak": 512, "reserved_bytes.all.peak": 2048})
        AllocatorSample(retries=2, allocated_bytes=512, reserved_bytes=2048)
    """

    retries: int  # how often it gave its cache back because there was no room
    allocated_bytes: int  # highest bytes of blocks in use, since peaks were last reset
    reserved_bytes: int  # highest bytes held from the driver, since then

    @classmethod
    def of(cls, stats: Mapping[str, int]) -> AllocatorSample:
        """Read what `torch.cuda.memory_stats` returns; before the device is first used that is empty, and all are 0."""
        return cls(stats.get(_COUNTER, 0), *(stats.get(f"{name}.all.peak", 0) for name in _PEAKS))


def advice(
    before: AllocatorSample,
    after: AllocatorSample,
    settings: Settings,
    plan: Plan = Plan(),  # noqa: B008 - frozen
    expand: Expand = lambda _settings: None,
) -> str | None:
    """Return what to do about retries between two samples, or what has been done.

    Args:
        before: counters of the step before.
        after: counters of the step.
        settings: of the allocator.
        plan: in force.
        expand: makes segments expandable in this process, and returns the new settings; None where it can't.

    Returns:
        One sentence; None when there were no retries.

    Example:
        >>> before, after = AllocatorSample(0, 40 * 2**20, 40 * 2**20), AllocatorSample(1, 42 * 2**20, 98 * 2**20)
        >>> print(advice(before, after, Settings()))
        the allocator found no room once in a step and gave its cache back to the driver, which takes time: at the \
peak it held 98.0 MiB for 42.0 MiB of tensors; free memory is in pieces: start Python with \
PYTORCH_ALLOC_CONF=expandable_segments:True
    """
    retries = after.retries - before.retries
    if retries <= 0:
        return None
    times = "once" if retries == 1 else f"{retries} times"
    return (
        f"the allocator found no room {times} in a step and gave its cache back to the driver, which takes time: at the "
        f"peak it held {format_bytes(after.reserved_bytes)} for {format_bytes(after.allocated_bytes)} of tensors; "
        f"{_cure(after, settings, plan, expand)}"
    )


def make_segments_expandable(settings: Settings, device: torch.device | None = None) -> str | None:
    """Have segments grow in place from now on, in this process and those it starts.

    Args:
        settings: of the allocator.
        device: the GPU that it is tried on; by default the current one.

    Returns:
        The new settings, as a text; None where the user has decided about them, or torch or the driver cannot.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # unannotated in torch
        return None
    if "expandable_segments" in settings.text or is_shared_with_windows():
        return None
    if torch.cuda.get_allocator_backend() != "native" or process_count() > 1:
        return None
    wanted = _with_expandable(settings)
    torch.cuda.empty_cache()
    try:
        _set_for_process(wanted)
        # a driver that cannot says so at the first segment, which is one that no free piece is large enough for
        idle_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        torch.empty(idle_bytes + 2 * MIB, dtype=torch.uint8, device=device or "cuda")
    except (RuntimeError, ValueError):
        with suppress(RuntimeError, ValueError):
            _set_for_process(",".join(filter(None, (settings.text, "expandable_segments:False"))))
        return None
    os.environ[next((name for name in VARIABLES if name in os.environ), VARIABLES[0])] = wanted
    return wanted


def _set_for_process(text: str) -> None:
    torch._C._accelerator_setAllocatorSettings(text)


def _with_expandable(settings: Settings) -> str:
    return ",".join(filter(None, (settings.text, "expandable_segments:True")))


class RetryWatch(Observer):
    """Watches a session for steps in which the allocator retries, and says so once per plan.

    Known limitations: one read per step, so retries of code between two steps count for the second one. Peaks are of
    the step where a `Meter` resets them, else of the whole run, which can hide fragmentation.

    Example:
        >>> counters = {"num_alloc_retries": 0, "allocated_bytes.all.peak": 99, "reserved_bytes.all.peak": 100}
        >>> said = []
        >>> watch = RetryWatch(said.append, read=lambda: dict(counters), settings=Settings())
        >>> for retries in (0, 3, 6):
        ...     counters["num_alloc_retries"] = retries
        ...     watch.step_ended(None, skipped=False)
        >>> said[0].split("; ")[1]
        'tensors fill it: use smaller micro-batches, with --accumulate 2'
    """

    def __init__(
        self,
        say: Callable[[str], None],  # called with the advice, on the training thread
        *,
        device: torch.device | None = None,  # the GPU that is watched; by default the current one
        # the allocator's counters, as `torch.cuda.memory_stats` names them; by default torch's own, and none before
        # CUDA is used
        read: Callable[[], Mapping[str, int]] | None = None,
        settings: Settings | None = None,  # of the allocator; by default those in the environment
        expand: Expand | None = None,  # as for `advice`; by default `make_segments_expandable` for the device
    ) -> None:
        self._say = say
        self._expand = expand or partial(make_segments_expandable, device=device)
        # of the GPU, beyond which Windows gives memory of the host
        self._most_bytes = _nearly_all(device) if is_shared_with_windows() else None
        self._read = read or partial(_counters, device)
        self._settings = settings
        self._plan = Plan()
        self._said: set[Plan] = set()
        self._before: AllocatorSample | None = None
        self._in_a_row = 0

    def plan_changed(self, plan: Plan) -> None:
        self._plan = plan
        self._begin_anew()

    def interrupted(self) -> None:
        # running out of memory counts as a retry, too: that step is no evidence
        self._begin_anew()

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        counters = self._read()
        if not counters:
            return
        before, self._before = self._before, AllocatorSample.of(counters)
        if self._most_bytes is not None and self._before.reserved_bytes >= self._most_bytes:
            self._say(_spills_to_windows(self._before.reserved_bytes, self._most_bytes))
            self._most_bytes = None
        if before is None or self._before.retries <= before.retries:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row >= _STEPS_IN_A_ROW and self._plan not in self._said:
            self._said.add(self._plan)
            settings = self._settings or Settings.from_environment(os.environ)
            text = advice(before, self._before, settings, self._plan, self._expand)
            if text is not None:
                self._say(text)

    def _begin_anew(self) -> None:
        self._before, self._in_a_row = None, 0


def _cure(after: AllocatorSample, settings: Settings, plan: Plan, expand: Expand) -> str:
    idle_bytes = after.reserved_bytes - after.allocated_bytes
    if idle_bytes > _IDLE_SHARE * after.reserved_bytes and not settings.expandable_segments:
        if (expanded := expand(settings)) is not None:
            return (
                f"free memory is in pieces: segments grow in place from here on, as with {VARIABLES[0]}={expanded}, which "
                "processes that are started now get too"
            )
        if is_shared_with_windows():
            smaller = ",".join(filter(None, (settings.text, "max_split_size_mb:256")))
            return f"free memory is in pieces: start Python with {VARIABLES[0]}={smaller}, as Windows has no expandable segments"
        return f"free memory is in pieces: start Python with {VARIABLES[0]}={_with_expandable(settings)}"
    cause = "tensors fill it" if idle_bytes <= _IDLE_SHARE * after.reserved_bytes else "segments are expandable already"
    instead = f" instead of {plan.accumulation}" if plan.accumulation > 1 else ""
    return f"{cause}: use smaller micro-batches, with {more_micro_batches(plan)}{instead}"


def _nearly_all(device: torch.device | None) -> float | None:
    if not torch.cuda.is_available():
        return None
    own = torch.device("cuda", torch.cuda.current_device()) if device is None or device.index is None else device
    if accelerator.allowed_share(own) < _NEARLY_ALL:  # it runs out of memory before
        return None
    return _NEARLY_ALL * torch.cuda.get_device_properties(own).total_memory


def _spills_to_windows(reserved_bytes: int, most_bytes: float) -> str:
    total = format_bytes(most_bytes / _NEARLY_ALL)
    return (
        f"{format_bytes(reserved_bytes)} are held of a GPU of {total}: beyond that Windows gives memory of the host and reports "
        f"nothing, and steps take many times as long; --capacity {exact_size(int(most_bytes) // MIB * MIB)} makes such a cell run "
        "out of memory, and memlab rescue it"
    )


def _counters(device: torch.device | None) -> Mapping[str, int]:
    counted = accelerator.counters(device) if accelerator.is_in_use() else None
    if counted is None:
        return {}
    peaks = (counted.allocated_peak or 0, counted.reserved_peak or 0)
    return {_COUNTER: counted.retries, **{f"{name}.all.peak": peak for name, peak in zip(_PEAKS, peaks, strict=True)}}
