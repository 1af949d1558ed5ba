"""`Target`: what a prediction is made for, and how sure it can be there."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memlab.allocator import Settings
from memlab.hardware.gpus import NOT_NVIDIA, Gpu, gpu, gpus
from memlab.hardware.roofline import Rates, rates_of
from memlab.measuring.device import device_for
from memlab.measuring.host_rates import host_rates
from memlab.plan import Plan, Precision
from memlab.runtime import accelerator
from memlab.runtime.cublas import workspaces
from memlab.runtime.fp32_products import rounds_factors
from memlab.runtime.workload import Workload
from memlab.trace.tracer import Choices

# half widths of the intervals, as shares. On the CPU ledger: measured over models and plans in tests/predicting
# (memory) and by `python -m tests.bench` (time). For GPUs: assumptions until tests/gpu has measured them
_CPU_MEMORY = (0.01, 0.01)
_GPU_MEMORY = (0.05, 0.05)
_OTHER_MEMORY = (0.2, 0.2)  # an assumption of other backends, which choose kernels of their own
_TIME = (0.5, 1.0)
# words of a name that make it another GPU: an RTX 4090 Laptop GPU is no RTX 4090
_KINDS = frozenset({"ti", "super", "laptop", "max", "mobile", "d"})
_CALIBRATED_TIME = (0.2, 0.25)


@dataclass(frozen=True)
class Target:
    """A device that a step is predicted for."""

    name: str  # in words
    rates: Rates  # how fast it works
    device: torch.device  # what techniques see as the device of the model
    compute_capability: tuple[int, int] | None  # of a GPU, (major, minor); None for a CPU
    choices: Choices  # what makes operators choose as on that device
    settings: Settings | None  # of the caching allocator; None where there is none
    workspaces: tuple[int, ...]  # sizes in bytes of what libraries allocate once and keep
    memory_shares: tuple[float, float]  # how far below and above the prediction a peak may lie
    rates_in_tf32: Rates | None = None  # how fast it works where products of fp32 may be rounded; None on a CPU
    notes: tuple[str, ...] = ()  # in words: what is assumed of it

    def rates_under(self, plan: Plan) -> Rates:
        """Return its rates under a plan; one that says nothing of tf32 leaves it as this process has it."""
        is_kept = plan.precision not in (Precision.FP32, Precision.TF32)
        is_rounded = rounds_factors() if is_kept else plan.precision is Precision.TF32
        return self.rates_in_tf32 if is_rounded and self.rates_in_tf32 is not None else self.rates

    def interval_bytes(self, needed_bytes: int) -> tuple[int, int]:
        """Lowest and highest peak that would be no surprise."""
        below, above = self.memory_shares
        return round(needed_bytes * (1 - below)), round(needed_bytes * (1 + above))


def interval_seconds(seconds: float, *, calibrated: bool) -> tuple[float, float]:
    """Shortest and longest step that would be no surprise."""
    below, above = _CALIBRATED_TIME if calibrated else _TIME
    return seconds * (1 - below), seconds * (1 + above)


def target_for(workload: Workload, device: str | Gpu | None) -> Target:
    """The target named, or the device the workload is on.

    Raises:
        MemlabError: no such GPU in the catalogue.
        WorkloadError: the model is on neither a CPU nor an accelerator.

    Known limitations:
        Of a GPU of this machine that the catalogue lacks memory is predicted, and no time.
    """
    if isinstance(device, Gpu):
        return _gpu_target(device)
    if device is not None and device.strip().casefold() != "cpu":
        return _gpu_target(gpu(device))
    if device is None and workload.device.type != "cpu":
        device_for(workload.device)  # says what is allowed
        return _gpu_target(_own_gpu(workload.device), Settings.from_environment(os.environ))
    return Target("CPU ledger", host_rates(), torch.device("cpu"), None, Choices(), None, (), _CPU_MEMORY)


@functools.cache
def _choices_of(model: Gpu) -> Choices:
    from memlab.trace.cuda_choices import cuda_choices
    from memlab.trace.hidden_memory import Temporaries

    entered: Callable[[], AbstractContextManager[Any]] = partial(cuda_choices, model)
    return Choices(entered, partial(Temporaries.of, gpu=model)) if model.is_of_nvidia else Choices(entered)


def _gpu_target(model: Gpu, settings: Settings | None = None) -> Target:
    device, is_known = torch.device(model.device_type), model.is_of_nvidia
    has_model = accelerator.allocates_like_cuda(device)
    return Target(
        name=model.name,
        rates=rates_of(model),
        rates_in_tf32=rates_of(model, allow_tf32=True),
        device=device,
        compute_capability=model.compute_capability if is_known else None,
        choices=_choices_of(model),
        settings=(settings or Settings()) if has_model else None,
        workspaces=workspaces(model.compute_capability) if is_known else (),
        memory_shares=_GPU_MEMORY if is_known else _OTHER_MEMORY,
        notes=() if is_known else tuple(_assumed(model, has_model=has_model)),
    )


def _assumed(model: Gpu, *, has_model: bool) -> Iterator[str]:
    if not has_model:
        yield f"allocated bytes only: memlab has no model of the allocator of {model.name}, which reserves more"
    yield f"operators as CUDA takes them, attention as its formula: not measured on {model.name}"


def _own_gpu(device: torch.device) -> Gpu:
    """The catalogue's entry of a GPU of this machine; for another GPU one whose rates are not known, as memory needs none."""
    name, total_bytes = accelerator.device_name(device), accelerator.total_bytes(device)
    words = set(re.findall(r"[a-z0-9]+", name.casefold()))

    def distance(listed: Gpu) -> tuple[bool, int]:
        is_other_form = ("pcie" in words) != listed.name.endswith("PCIe")
        return is_other_form, abs(listed.memory_bytes - total_bytes)

    fitting = [
        listed
        for listed in gpus()
        if listed.device_type == device.type
        and (model := _model(listed.name.casefold())) <= words
        and words & _KINDS <= model
    ]
    if fitting:
        return min(fitting, key=distance)
    capability = accelerator.compute_capability(device)
    count = 0 if capability is None else torch.cuda.get_device_properties(device).multi_processor_count
    return Gpu(name, total_bytes, math.nan, None, None, None, None, capability or NOT_NVIDIA, "", count, device.type)


def _model(name: str) -> set[str]:
    """The words of a catalogue's name that every name of that GPU has: not its memory, nor its form."""
    return {word for word in name.split() if not word.endswith("gb") and word not in ("sxm", "pcie")}
