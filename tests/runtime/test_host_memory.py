"""Host memory beside a GPU where the system pins little of it, as Windows and WSL do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memlab.runtime import host_memory
from memlab.runtime.host_memory import pinned

_EMPTY = torch.empty


def _pins(most_bytes: int, text: str = "CUDA error: out of memory") -> Callable[..., torch.Tensor]:
    def empty(size_bytes: int, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory and size_bytes > most_bytes:
            raise RuntimeError(text)
        return _EMPTY(size_bytes, **options)

    return empty


def test_what_is_not_pinned_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", _pins(2**20))
    said: list[str] = []
    assert pinned(2**20, said.append).nbytes == 2**20
    assert said == []
    assert pinned(2**21, said.append).nbytes == 2**21
    assert said == [
        "the system pins no more host memory (2.0 MiB were asked for): what leaves the GPU goes to memory that is not pinned, "
        "and copies take longer"
    ]


def test_a_host_that_is_full_is_no_reason_to_promise_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", _pins(0))
    monkeypatch.setattr(host_memory, "_available_bytes", lambda: 2.0**20)
    with pytest.raises(RuntimeError, match="out of memory"):
        pinned(2**21)
    assert pinned(2**19).nbytes == 2**19


def test_other_errors_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", _pins(0, "Cannot access accelerator device when none is available."))
    with pytest.raises(RuntimeError, match=r"^Cannot access accelerator"):
        pinned(1)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="the system does not say it")
def test_the_system_says_what_it_can_give() -> None:
    assert 2**20 < host_memory._available_bytes() < 2**50  # nothing public says it
