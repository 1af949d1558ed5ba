"""DeepSpeed's operators for files (async_io): built once, in a folder of memlab's own, and loaded from there.

DeepSpeed would build them at first use, under a lock file in the user's cache that stays when the build is ended: every later
run waits for it, without end and without a word. So:

1. A process of its own builds into a temporary folder, which is renamed when it is complete. There is no lock, and nothing
   that an ended build leaves is ever waited for. Two builds at the same time are twice the work, and the second is dropped.
2. It is built where the live objects are, before ranks start, so their limit on silence does not count it. Ctrl-C ends it.
3. Whoever needs the operators imports the finished files, past the lock that torch takes even to load one.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partialmethod
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memlab.errors import ScaleError
from memlab.runtime.interrupts import deferred_interrupts

INSTALL = "apt-get install g++ libaio-dev (or CXX, CFLAGS and LDFLAGS that say where they are)"
_BUILD = "from memlab.scaleout.async_io import _build; _build()"
_INCLUDES = b"#include <Python.h>\n#include <libaio.h>\n"
_UNFINISHED = "building-"
_ABANDONED_SECONDS = 24 * 3600.0
_POLL_SECONDS, _SAY_SECONDS = 0.2, 5.0
_MOST_LINES = 12


def missing(device: torch.device) -> str:
    """Return what the build would fail for; empty when it can begin, or is done."""
    if _folder(device).exists():
        return ""
    compiler = os.environ.get("CXX", "c++")
    words = [word for name in ("CFLAGS", "LDFLAGS") for word in shlex.split(os.environ.get(name, ""))]
    build = [*shlex.split(compiler), "-x", "c++", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", "-"]
    try:
        built = subprocess.run(  # noqa: S603 - the user's compiler
            [*build, "-o", os.devnull, *words, "-laio"], input=_INCLUDES, capture_output=True, check=False
        )
    except OSError:
        return f"there is no C++ compiler ({compiler})"
    if built.returncode == 0:
        return ""
    return f"a program that uses libaio could not be built ({_first_error(built.stderr)})"


def ensure_built(device: torch.device, say: Callable[[str], object]) -> None:
    """Build the operators, unless that has been done.

    Raises:
        ScaleError: the build failed, or there is no place for it.
        KeyboardInterrupt: Ctrl-C, also where it is held back; the build has ended.
    """
    folder = _folder(device)
    if folder.exists():
        return
    began = time.monotonic()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=folder.parent) as unfinished:
            operators = Path(unfinished) / "operators"
            _build_in(operators, device, say)
            for path in operators.rglob("*.o"):
                path.unlink()
            try:
                operators.rename(folder)
            except OSError:
                if not folder.exists():  # another process was faster
                    raise
    except OSError as error:
        raise ScaleError(
            f"DeepSpeed's file operators cannot be built in {folder.parent} ({error.strerror}): set XDG_CACHE_HOME to a "
            "folder that can be written"
        ) from error
    say(f"built DeepSpeed's file operators in {time.monotonic() - began:.0f} s")


@contextmanager
def loading_prebuilt(device: torch.device) -> Iterator[None]:
    """Have DeepSpeed import what is built instead of building it."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

    folder = _folder(device)
    with ExitStack() as undo:
        for kind in (AsyncIOBuilder, PinMemoryBuilder):
            if _operator(folder, kind.NAME).exists():
                undo.callback(setattr, kind, "jit_load", kind.jit_load)
                kind.jit_load = partialmethod(_load, folder)
        yield


def _load(builder: Any, folder: Path, *_verbose: bool) -> ModuleType:
    return _imported(_operator(folder, builder.name))


@functools.cache
def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _operator(folder: Path, name: str) -> Path:
    return folder / name / f"{name}.so"


def _folder(device: torch.device) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    versions = f"deepspeed-{version('deepspeed')}-torch-{torch.__version__}-{sys.implementation.cache_tag}"
    return cache / "memlab" / f"{versions}-{device.type}"


def _remove_abandoned(folder: Path) -> None:
    """Remove what builds left that were killed; one that is under way is younger."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        with suppress(FileNotFoundError):  # its build has ended
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


# -- the build -------------------------------------------------------------------------------------


def _build_in(folder: Path, device: torch.device, say: Callable[[str], object]) -> None:
    folder.mkdir()
    log = folder.with_name("log")
    # ninja comes with DeepSpeed, beside an interpreter that need not be on the path
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {
        **os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "PATH": path,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # fmt: skip
    if device.type == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    # what comes while Ctrl-C is held back is delivered between two looks at the build
    with deferred_interrupts() as interrupts, log.open("wb") as output:
        build = subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, "-c", _BUILD], stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            reporter = _Reporter(say)
            while build.poll() is None:
                reporter.look(log)
                interrupts.deliver()
                time.sleep(_POLL_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                # ninja ends its compilers, which are in groups of their own
                os.killpg(build.pid, signal.SIGTERM)
            build.wait()
    if build.returncode:
        said = log.read_bytes()
        error = ScaleError(f"DeepSpeed's file operators could not be built ({_first_error(said)})")
        error.add_note("\n".join(said.decode(errors="replace").strip().splitlines()[-_MOST_LINES:]))
        raise error


def _build() -> None:
    """Build both; runs in a process of its own."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

    for kind in (AsyncIOBuilder, PinMemoryBuilder):
        # torch asks for symbols of a debugger, which take half of the compiler's time
        kind.cxx_args = lambda self, own=kind.cxx_args: [*own(self), "-g0"]
    AsyncIOBuilder().load(verbose=True)  # that of pinned memory first, which it needs


class _Reporter:
    """Says how far the build is: at once, and then every few seconds."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._began = time.monotonic()
        self._next_seconds = 0.0

    def look(self, log: Path) -> None:
        if time.monotonic() < self._next_seconds:
            return
        self._next_seconds = time.monotonic() + _SAY_SECONDS
        done = re.findall(rb"^\[(\d+)/(\d+)\]", log.read_bytes(), re.MULTILINE)
        files = f", file {int(done[-1][0])} of {int(done[-1][1])}" if done else ""
        self._say(
            "building DeepSpeed's file operators, once for these versions, which takes a few minutes: "
            f"{time.monotonic() - self._began:.0f} s{files}"
        )


def _first_error(said: bytes) -> str:
    """The line that tells most of what a compiler, linker or Python said."""
    lines = said.decode(errors="replace").strip().splitlines() or ["no output"]
    return next(
        (line for line in lines if re.search(r"\b(error|cannot find)\b", line, re.IGNORECASE)), lines[-1]
    ).strip()
