"""Where and when something was measured, in words for results."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime

import torch


def here() -> dict[str, str]:
    """The machine and the day."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    machine = f"{device} with {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
    return {"machine": machine, "date": datetime.now(UTC).date().isoformat()}
