"""Versions, processors and memory of this machine, in lines that anybody may read."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

import torch

import memlab
from memlab.hardware.host import cores, host_bytes
from memlab.runtime import accelerator
from memlab.units import format_bytes

# what memlab works with, and what notebooks are run by
PACKAGES = (
    "torch", "numpy", "transformers", "accelerate", "bitsandbytes", "peft", "trl", "deepspeed", "lightning",
    "ipython", "ipykernel", "ipywidgets", "anywidget", "jupyterlab", "notebook", "marimo", "matplotlib",
)  # fmt: skip
_NEEDED = re.compile(r"([A-Za-z0-9_.-]+)\s*(?:>=\s*([0-9.]+))?[^;]*(?:;\s*extra\s*==\s*['\"](\w+)['\"])?")


def versions() -> Mapping[str, str]:
    """Return the version of each package that is installed, of those that matter here."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def needed(extra: str = "") -> Mapping[str, str]:
    """Return the lowest version of each package that memlab, or one of its extras, asks for; empty where it is not installed as a package.

    Example:
        >>> sorted(needed())
        ['numpy', 'torch']
    """
    try:
        asked = metadata.requires("memlab") or []
    except metadata.PackageNotFoundError:
        return {}
    parts = (_NEEDED.match(line) for line in asked)
    return {each[1].lower(): each[2] or "0" for each in parts if each is not None and (each[3] or "") == extra}


def is_at_least(version: str, lowest: str) -> bool:
    """Return whether a version is no lower than another; what follows its numbers does not count.

    Example:
        >>> is_at_least("2.13.0+cpu", "2.6"), is_at_least("8.1", "8.1.2"), is_at_least("5.0rc1", "5")
        (True, False, True)
    """

    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text.split("+")[0])]

    return numbers(version) >= numbers(lowest)


def devices() -> Iterator[str]:
    """Yield each device that models can be on, in words."""
    size = host_bytes()
    yield f"CPU: {cores()} cores" + ("" if size is None else f", {format_bytes(size)} of memory")
    for device in accelerator.every() if accelerator.device_type() is not None else ():
        yield f"GPU {device.index}: {accelerator.device_name(device)}, {format_bytes(accelerator.total_bytes(device))}"


def described() -> list[str]:
    """Return the lines about this machine that head a report."""
    built = torch.version.cuda and f"CUDA {torch.version.cuda}"
    built = built or (torch.version.hip and f"ROCm {torch.version.hip}") or "the CPU"
    system = f"{platform.system()} {platform.machine()}"
    return [
        f"memlab {memlab.__version__}, Python {platform.python_version()} ({platform.python_implementation()}), {system}",
        f"torch for {built}; {torch.get_num_threads()} threads"
        + ("; in a notebook" if "ipykernel" in sys.modules else ""),
        *devices(),
        ", ".join(f"{package} {version}" for package, version in versions().items()),
    ]
