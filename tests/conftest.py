"""Guards around every test: what it leaves behind in torch, in memlab or on disk makes it fail."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # a thread, for nothing
# nbformat imports jsonschema, and that compiles 39 grammars of addresses for three seconds, where it finds them
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

_ROOT = str(Path(__file__).parents[1])
if _ROOT not in sys.path:  # so that `tests.helpers` is found however pytest is started
    sys.path.insert(0, _ROOT)

pytest.register_assert_rewrite("tests.loops.running", "tests.driving")

from tests.helpers import tiers  # noqa: E402
from tests.helpers.fingerprint import differing, global_state  # noqa: E402

torch.set_num_threads(1)
# the same examples in every run, however busy the machine; MEMLAB_LONG=1 looks for others
settings.register_profile(
    "memlab", deadline=None, derandomize=not os.environ.get("MEMLAB_LONG"), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("memlab")
# who started the tests may have Ctrl-C ignored (a shell's background job) or blocked (some runners of CI), and what is
# started from here inherits that: tests that press it would wait for it in vain
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
# threads that libraries keep for the life of the process; the runner is Jupyter's, made where a loop runs already (Playwright's)
_LASTING_THREADS = (
    "MainThread - runner", "tqdm", "IPython", "asyncio", "ThreadPoolExecutor", "Tmonitor", "TMonitor", "pytest", "pydevd",
)  # fmt: skip
_PATIENCE_SECONDS = 2.0


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Under `-n`, tests of a module stay in one process, so that what they share is made once."""
    if config.getoption("numprocesses", None) and config.getoption("dist") == "no":
        config.option.dist = "worksteal"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what only the full tier runs, before tests are selected by markers."""
    tiers.mark_full(items)
    # a long test that begins last would keep one process busy while the others wait
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Temporary files of this run, so that other processes' files are never counted."""
    before, folder = tempfile.tempdir, tmp_path_factory.mktemp("temporary")
    tempfile.tempdir = str(folder)
    yield folder
    tempfile.tempdir = before


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Let garbage collections look only at what the module's tests make, not at the million objects of the libraries."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers for every test, in whatever order they run."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global state is what libraries use
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """No compiled code of an earlier test: where there is any, a loop's own code is left alone."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is not None and dynamo.FRAME_COUNTER:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def nothing_left_behind(own_temporary_folder: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail on a session, a mode, a hook, a thread, a file or a switch that a test left."""
    modes_before = len(_get_current_dispatch_mode_stack())
    threads_before = set(threading.enumerate())
    files_before = _memlab_files(own_temporary_folder)
    before = {**global_state(), "handler of Ctrl-C": signal.getsignal(signal.SIGINT)}
    yield
    left = _sessions_left()
    # popped first, so that one test's failure is not the next one's
    left += [f"dispatch mode {type(_pop_mode()).__name__}" for _ in _get_current_dispatch_mode_stack()[modes_before:]]
    left += differing(before, {**global_state(), "handler of Ctrl-C": signal.getsignal(signal.SIGINT)})
    _restore_switches(before)
    left += [f"file {name}" for name in sorted(_memlab_files(own_temporary_folder) - files_before)]
    left += [f"thread {thread.name}" for thread in _threads_left(threads_before)]
    assert not left, f"{request.node.name} left behind: {'; '.join(left)}"


def _sessions_left() -> list[str]:
    if "memlab.session" not in sys.modules:
        return []
    from memlab.session import sessions

    left = list(sessions())
    for session in left:
        session.undo()
    return [f"session {session!r}" for session in left]


def _restore_switches(before: dict[str, object]) -> None:
    signal.signal(signal.SIGINT, before["handler of Ctrl-C"])  # type: ignore[arg-type]
    torch.set_grad_enabled(bool(before["torch grad mode"]))
    torch.set_default_dtype(before["torch default dtype"])  # type: ignore[arg-type]
    torch.set_float32_matmul_precision(str(before["torch matmul precision"]))
    torch.nn.Module.__call__ = before["torch.nn.Module.__call__"]  # type: ignore[method-assign, assignment]


def _memlab_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("memlab-*")}


def _threads_left(before: set[threading.Thread]) -> list[threading.Thread]:
    """New threads that memlab could have made, after a moment to come to their end."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        left = [t for t in threading.enumerate() if t not in before and not t.name.startswith(_LASTING_THREADS)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)
