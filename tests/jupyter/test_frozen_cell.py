"""Frozen models of cells off the device between their uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memlab import Workload, predict
from memlab.jupyter.magic import loaded
from memlab.plan import Plan
from memlab.techniques.offload.spill import is_spilled
from tests.jupyter.conftest import Cell

_MAKE = """
import torch
def net(seed):
    torch.manual_seed(seed)
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64)) for _ in range(3)]
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Sequential(*blocks), torch.nn.Linear(64, 8))
student, steps = net(0), 6
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
inputs = torch.randn(16, 64)
"""
_TEACHER = "teacher = net(1).requires_grad_(False).eval()"
_DISTIL = """
losses = []
for step in range(steps):
    with torch.no_grad():
        before = teacher(inputs)
    outputs = student(inputs)
    loss = (outputs - before).square().mean() + (outputs - teacher(inputs + outputs.mean())).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""


def _at_rest(model: torch.nn.Module) -> int:
    return sum(is_spilled(p.untyped_storage()) for p in model.parameters())


def _as_written(shell: Any, cell: Cell) -> list[float]:
    assert cell(f"{_MAKE}\n{_TEACHER}\n{_DISTIL}").error is None
    found: list[float] = shell.user_ns["losses"]
    return found


@pytest.mark.parametrize("place", ["before", "in the cell"])
def test_a_teacher_is_off_the_device_between_its_uses(shell: Any, cell: Cell, place: str) -> None:
    expected = _as_written(shell, cell)
    first, inside = (_TEACHER, "") if place == "before" else ("del teacher", _TEACHER)
    assert cell(f"{_MAKE}\n{first}").error is None
    ran = cell(f"%%memfit --offload frozen\n{inside}\n{_DISTIL}")
    assert ran.error is None
    assert shell.user_ns["losses"] == expected
    teacher = shell.user_ns["teacher"]
    weights = [*teacher.parameters()]
    assert _at_rest(teacher) == 7  # the last layer's weight is small
    assert "off the device between uses: Sequential (208.0 KiB)" in " ".join(ran.out.split())
    assert cell("%memfit undo").error is None
    assert _at_rest(teacher) == 0
    assert all(map(torch.equal, weights, shell.user_ns["net"](1).parameters()))


def test_its_peak_is_the_predicted_one(shell: Any, cell: Cell) -> None:
    assert cell(f"{_MAKE}\n{_TEACHER}").error is None
    assert cell(f"%%memfit\n{_DISTIL}").error is None
    for flags in ("--offload frozen", "--offload frozen,optimizer --checkpoint"):
        assert cell(f"%%memfit {flags}\n{_DISTIL}").error is None
    history = loaded[shell].notebook.history_of(shell.user_ns["student"])
    assert len(history.measurements) == 3
    workload = Workload(shell.user_ns["student"], [shell.user_ns["optimizer"]], history.batch)
    workload.tape = history.tape
    for row in history.measurements:
        predicted = predict(workload, Plan.of_label(row.plan))
        assert predicted.peak_allocated_bytes == pytest.approx(row.peak_allocated_bytes, rel=0.01)


def test_a_cell_without_anything_frozen_is_told_so(cell: Cell) -> None:
    assert cell(_MAKE).error is None
    ran = cell("%%memfit --offload frozen\nstudent(inputs).sum().backward(); optimizer.step()")
    assert ran.error is not None
    assert str(ran.error) == (
        "offload: frozen: beside Sequential there is no frozen model on cpu with a weight of 1024 elements or more, and no such part "
        "within it; freeze one first (requires_grad_(False)), or use --offload optimizer,activations"
    )
