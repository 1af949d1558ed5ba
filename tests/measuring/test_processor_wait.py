"""How long the training thread waits for a processor that others have."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memlab.measuring import times
from memlab.measuring.times import ProcessorWait


def worked(seconds: float) -> float:
    found = ProcessorWait()
    found.look()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    found.look()
    return found.share


@pytest.mark.skipif(not times._COUNTS.exists(), reason="only Linux tells")
def test_a_thread_that_shares_its_processor_waits_about_half_of_the_time() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        share = worked(1.0)
    finally:
        burner.kill()
        burner.wait()
        os.sched_setaffinity(0, before)
    assert share > 0.3


def test_sleeping_is_no_waiting() -> None:
    found = ProcessorWait()
    found.look()
    time.sleep(0.3)
    found.look()
    assert found.share < 0.1


def test_where_the_system_does_not_tell_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(times, "_COUNTS", tmp_path / "missing")
    assert worked(0.15) == 0.0
