"""Optional packages: imported when a feature needs them, with an install hint when they are absent."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from memlab.errors import MissingExtraError

# package -> (what of memlab needs it, the extra of memlab's that brings it)
_EXTRAS = {
    "bitsandbytes": ("8-bit Adam", "lab"),
    "transformers": ("Adafactor", "lab"),
    "safetensors": ("weights from files", "lab"),
    "tokenizers": ("the course's text", "lab"),
    "accelerate": ("a Transformers folder built on a GPU", "lab"),
    "matplotlib": ("the picture of a receipt", "lab"),
    "anywidget": ("the panel", "lab"),
    "ipywidgets": ("the panel", "lab"),
    "IPython": ("the magics", "lab"),
    "cloudpickle": ("training in many processes", "lab"),
    "deepspeed": ("ZeRO", "deepspeed"),
}


def available(package: str) -> bool:
    """Return whether an optional package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def require(package: str) -> ModuleType:
    """Import an optional package.

    Raises:
        MissingExtraError: it is not installed; the message holds the command that installs it.
    """
    try:
        with _without_chatter(package), _without_modes():
            return importlib.import_module(package)
    except ImportError as error:
        raise _missing(package) from error


def require_installed(package: str) -> None:
    """Raise as `require` does where an optional package is missing, without importing it."""
    if not available(package):
        raise _missing(package)


def _missing(package: str) -> MissingExtraError:
    feature, extra = _EXTRAS[package]
    return MissingExtraError(
        f"{feature} needs {package}, which is not installed: pip install 'memlab[{extra}]' (or pip install {package})"
    )


@contextmanager
def _without_chatter(package: str) -> Iterator[None]:
    """Keep what a package warns about while it is imported off the screen, unless the user has set up logging.

    bitsandbytes warns of what only its 4-bit layers would need, and that would stand in the user's cell.
    """
    logger, handler = logging.getLogger(package), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _without_modes() -> Iterator[None]:
    """Import a package as at the top of a program, whatever is in force where it is needed first.

    One that makes tensors, as bitsandbytes does, would make them on the loop's default device, or run out of memory
    half-way under a capacity that is used up, and stay broken until Python is restarted.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    modes = torch.utils._python_dispatch._disable_current_modes()
    with modes, torch._C.DisableTorchFunction(), torch.inference_mode(mode=False):
        yield
