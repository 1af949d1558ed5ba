"""Optional packages: imported when a feature needs them, with an install hint when they are absent."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from memlab.errors import MissingExtraError

# package -> (what of memlab needs it, the extra of memlab's that brings it)
_EXTRAS = {
    "bitsandbytes": ("8-bit Adam or NF4", "lab"),
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
    "peft": ("--lora", "adapters"),
}


def available(package: str) -> bool:
    """Return whether an optional package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def require(package: str) -> ModuleType:
    """Import an optional package. Raises `MissingExtraError`: it is not installed; the message holds the command that installs it."""
    try:
        # where it is being imported, this waits until it is there
        return importlib.import_module(package) if package in sys.modules else _imported(package)
    except ImportError as error:
        raise _missing(package) from error


def _imported(package: str) -> ModuleType:
    """Import a package on a thread of its own: as at the top of a program, and to the end.

    Torch's modes are of a thread: a package that makes tensors, as bitsandbytes does, would make them on the loop's default
    device, or run out of memory half-way under a capacity that is used up. Ctrl-C would break it off half-way as well. What was
    imported in half stays broken until Python is restarted.
    """
    made: list[ModuleType | BaseException] = []

    def work() -> None:
        try:
            with _without_chatter():
                made.append(importlib.import_module(package))
        except BaseException as error:  # noqa: BLE001 - it is raised where the package is asked for
            made.append(error)

    thread = threading.Thread(target=work, name=f"memlab imports {package}", daemon=True)
    thread.start()
    thread.join()
    (result,) = made
    if isinstance(result, BaseException):
        raise result
    return result


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
def _without_chatter() -> Iterator[None]:
    """Keep what packages warn about while they are imported off the screen, unless the user has set up logging.

    bitsandbytes, which peft imports as well, warns of what only its 4-bit layers would need, and that would stand in the user's cell.
    """
    loggers, handler = [logging.getLogger(package) for package in _EXTRAS], logging.NullHandler()
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
