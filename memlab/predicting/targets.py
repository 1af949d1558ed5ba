"""`Target`: what a prediction is made for, and how sure it can be there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memlab.allocator import Settings
from memlab.devices import Gpu, gpu, gpus
from memlab.errors import WorkloadError
from memlab.measuring.device import device_for
from memlab.measuring.host_rates import host_rates
from memlab.roofline import Rates, rates_of
from memlab.trace.tracer import Choices
from memlab.workload import Workload

# half widths of the intervals, as shares. On the CPU ledger: measured over models and plans in tests/predicting
# (memory) and by `python -m tests.bench` (time). For GPUs: assumptions until tests/gpu has measured them
_CPU_MEMORY = (0.01, 0.01)
_GPU_MEMORY = (0.05, 0.05)
_TIME = (0.5, 1.0)
_CALIBRATED_TIME = (0.2, 0.25)


@dataclass(frozen=True)
class Target:
    """A device that a step is foretold for.

    Args:
        name: in words.
        rates: how fast it works.
        device: what techniques see as the device of the model.
        compute_capability: of a GPU, (major, minor); None for a CPU.
        choices: what makes operators choose as on that device.
        settings: of the caching allocator; None where there is none.
        workspaces: sizes in bytes of what libraries allocate once and keep.
        memory_shares: how far below and above the prediction a peak may lie.
    """

    name: str
    rates: Rates
    device: torch.device
    compute_capability: tuple[int, int] | None
    choices: Choices
    settings: Settings | None
    workspaces: tuple[int, ...]
    memory_shares: tuple[float, float]

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

    Args:
        workload: the live objects.
        device: a GPU of the catalogue or its name, "cpu", or None.

    Raises:
        MemlabError: no such GPU in the catalogue.
        WorkloadError: the model is on neither a CPU nor a CUDA device.
    """
    if isinstance(device, Gpu):
        return _gpu_target(device)
    if device is not None and device.strip().casefold() != "cpu":
        return _gpu_target(gpu(device))
    if device is None and workload.device.type == "cuda":
        return _gpu_target(_catalogued(workload.device))
    if device is None and workload.device.type != "cpu":
        device_for(workload.device)  # says what is allowed
    return Target("CPU ledger", host_rates(), torch.device("cpu"), None, Choices(), None, (), _CPU_MEMORY)


def _gpu_target(model: Gpu) -> Target:
    from memlab.trace.cuda_choices import cuda_choices
    from memlab.trace.hidden_memory import workspaces

    entered: Callable[[], AbstractContextManager[Any]] = partial(cuda_choices, model)
    return Target(
        name=model.name,
        rates=rates_of(model),
        device=torch.device("cuda"),
        compute_capability=model.compute_capability,
        choices=Choices(entered, partial(_hidden_on, model)),
        settings=Settings.from_environment({}),
        workspaces=workspaces(model),
        memory_shares=_GPU_MEMORY,
    )


def _hidden_on(model: Gpu, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[int, ...]:
    from memlab.trace.hidden_memory import hidden_bytes

    return hidden_bytes(func, args, kwargs, out, model)


def _catalogued(device: torch.device) -> Gpu:
    """The catalogue's entry of a GPU of this machine."""
    properties = torch.cuda.get_device_properties(device)
    words = properties.name.casefold().replace("-", " ")
    fitting = [listed for listed in gpus() if listed.name.split()[0].casefold() in words.split()]
    if not fitting:
        raise WorkloadError(
            f"{properties.name} is not in the catalogue of GPUs, so no time can be foretold; name one that is like it: "
            f"device={gpus()[-1].name!r}"
        )
    return min(fitting, key=lambda listed: abs(listed.memory_bytes - properties.total_memory))
