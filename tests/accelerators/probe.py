"""The device `probe`: a backend of torch's PrivateUse1 with memory, streams, events and random numbers of its own (`probe.cpp`).

Once registered it is the accelerator of the whole process, so tests on it run in processes of their own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension

TOTAL_BYTES = 4 * 2**30


def _module() -> ModuleType:
    """Functions that torch asks of a backend, `torch.probe`; those of memory, streams and events are left to `torch.accelerator`."""
    asked: Any = torch.ops.probe
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda _device=None: "Probe",
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": asked.seed,
        "get_rng_state": lambda _device="probe": asked.random_state(),
        "set_rng_state": lambda state, _device="probe": asked.set_random_state(state),
        "get_per_process_memory_fraction": lambda _device=None: asked.share(),
        "set_per_process_memory_fraction": lambda share, _device=None: asked.set_share(share),
    }
    module = ModuleType("torch.probe")
    vars(module).update(functions)
    return module


def register() -> torch.device:
    """Build the backend, unless it is built, and make it the accelerator of this process."""
    source = Path(__file__).with_suffix(".cpp")
    version = torch.__version__.replace(".", "_").replace("+", "_")
    cpp_extension.load(
        f"memlab_probe_{version}_{sys.version_info[1]}", [str(source)], extra_cflags=["-O1"], is_python_module=False
    )
    torch.utils.rename_privateuse1_backend("probe")
    torch._register_device_module("probe", _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device("probe", 0)
