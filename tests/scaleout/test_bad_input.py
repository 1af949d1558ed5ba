"""What is missing, taken, full or interrupted: one clear line, nothing lost, nothing left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from memlab import Workload, launch
from memlab.errors import MissingExtraError, ScaleError
from memlab.scaleout import async_io, launching, results, serialization, tensors
from memlab.scaleout.results import Results, random_states
from memlab.session.snapshot import Snapshot
from tests.helpers.needs import needs
from tests.helpers.snapshots import changed_between
from tests.scaleout.runs import gpt2, texts, trained


def folders() -> set[str]:
    return {each.name for each in Path(tempfile.gettempdir()).glob("memlab-*")}


def no_training() -> None:
    """Where nothing is to begin."""


def test_deepspeed_is_missed_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingExtraError, match=r"^ZeRO needs deepspeed, which is not installed: pip install 'memlab"):
        launch(no_training, gpt2(), "--scale zero2")
    assert not folders()


@needs(extra="deepspeed")
def test_libaio_is_missed_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = r"^--scale zero3 --offload optimizer:disk needs a C\+\+ compiler and libaio with its header, and there is no C\+\+ comp"
    with pytest.raises(ScaleError, match=said):
        launch(no_training, gpt2(), "--scale zero3 --offload optimizer:disk")
    assert not folders()


@needs(extra="deepspeed")
def test_a_disk_without_room_for_what_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = gpt2()
    sent_bytes = 2 * sum(tensor.nbytes for tensor in tensors.all_of(workload).values())
    usage = shutil._ntuple_diskusage(10**9, 10**9 - sent_bytes, sent_bytes)  # type: ignore[attr-defined]
    monkeypatch.setattr(launching.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(async_io, "missing", lambda _: "")
    monkeypatch.setattr(async_io, "ensure_built", lambda *_: None)
    with pytest.raises(
        ScaleError, match=r"is sent and returned .* are offloaded to others, and .* free: set TMPDIR to a disk"
    ):
        launch(no_training, workload, "--scale zero3 --offload optimizer:disk")
    assert not folders()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.full
def test_a_port_that_is_taken_is_not_used(monkeypatch: pytest.MonkeyPatch, taken_port: int) -> None:
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": taken_port, "RANK": 7, "WORLD_SIZE": 9}.items():
        monkeypatch.setenv(name, str(value))
    launched = launch(lambda: (os.environ["RANK"], os.environ["WORLD_SIZE"]), gpt2(), "--scale ddp", nproc=1)
    assert launched.value == ("0", "1")


def test_an_interrupt_while_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = gpt2()
    before = Snapshot(workload)

    def interrupted(*_args: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(launching, "_listen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(no_training, workload, "--scale ddp")
    assert changed_between(before, Snapshot(workload)) == []
    assert not folders()
    left = [
        child for child in psutil.Process().children(recursive=True) if "memlab.scaleout" in " ".join(child.cmdline())
    ]
    assert left == []


def come_home(folder: Path) -> tuple[Workload, Results]:
    """What ranks would have left of a run: the workload as it is there, and what comes beside its tensors."""
    there = gpt2()
    trained(there, texts(2))
    tensors.store(tensors.all_of(there), folder)
    groups = [[{k: v for k, v in group.items() if k != "params"} for group in o.param_groups] for o in there.optimizers]
    assert there.scheduler is not None
    home = Results(None, groups, [{}], there.scheduler.state_dict(), random_states(there.device))
    return there, serialization.unpack(serialization.pack({"home": home}))["home"]


def test_an_interrupt_before_the_first_write_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, home = come_home(tmp_path)
    workload = gpt2()
    before = Snapshot(workload)

    def interrupted(*_args: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(results.tensors, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.restore_results(tmp_path, home, workload)
    assert changed_between(before, Snapshot(workload)) == []


def test_an_interrupt_between_writes_waits_for_the_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there, home = come_home(tmp_path)
    workload = gpt2()
    write = results._write_state

    def pressed(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write(*args)

    monkeypatch.setattr(results, "_write_state", pressed)
    with pytest.raises(KeyboardInterrupt):
        results.restore_results(tmp_path, home, workload)
    assert changed_between(Snapshot(there), Snapshot(workload)) == []
