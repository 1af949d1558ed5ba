"""Loops over pieces, of which a trace asks for a few."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.measuring.observation import RawEvent
from memlab.runtime.rounds import rounds, rounds_told_to
from memlab.trace.fast_fakes import FastFakes
from memlab.trace.recorder import Priced, Recorder

PIECES = [slice(start, start + 8) for start in range(0, 60, 8)]  # eight, the last one with four rows
Loop = Callable[[torch.Tensor, torch.Tensor], int]


def sums(rows: torch.Tensor, total: torch.Tensor) -> int:
    """Keep nothing, but the last piece until there is another."""
    ran = 0
    for piece in rounds(PIECES):
        scaled = rows[piece] * 2
        total += scaled.sum(0)
        ran += 1
    return ran


def keeps(rows: torch.Tensor, _total: torch.Tensor) -> int:
    kept = [rows[piece] * 2 for piece in rounds(PIECES)]
    return len(kept)


def differs(rows: torch.Tensor, total: torch.Tensor) -> int:
    ran = 0
    for piece in rounds(PIECES):
        scaled = rows[piece] * 2
        total += (scaled if ran % 2 else scaled * 2).sum(0)
        ran += 1
    return ran


def seen(loop: Loop, *, told: bool) -> tuple[int, list[RawEvent], list[Priced], int]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(FastFakes(mode))
    with mode:
        rows, total = torch.empty(60, 16), torch.empty(16)
    recorder.begin([])
    with recorder, rounds_told_to(recorder.rounds if told else iter):
        ran = loop(rows, total)
        after = rows * 3  # numbered after all rounds
        assert after.shape == rows.shape
    return ran, [event[1:] for event in recorder.finish().raw], recorder.priced, recorder.born


def test_a_loop_that_nobody_traces_runs_all_rounds() -> None:
    assert [*rounds(PIECES)] == PIECES


def test_rounds_that_do_the_same_are_noted_as_if_they_had_run() -> None:
    ran, *noted = seen(sums, told=True)
    ran_all, *noted_all = seen(sums, told=False)
    assert (ran, ran_all) == (4, 8)
    assert noted == noted_all


@pytest.mark.parametrize("loop", [keeps, differs])
def test_rounds_that_leave_something_or_do_something_else_are_all_run(loop: Loop) -> None:
    assert seen(loop, told=True) == seen(loop, told=False)


def test_where_nobody_watches_one_round_is_run() -> None:
    recorder = Recorder(FastFakes(FakeTensorMode(allow_non_fake_inputs=True)))
    with rounds_told_to(recorder.rounds):
        assert [*rounds(PIECES)] == PIECES[:1]
