"""Frozen models off a GPU between their uses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memlab import Workload, fit, measure, predict
from memlab.techniques.offload.frozen import frozen_beside
from memlab.units import format_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

_WIDTH = 512
_WEIGHTS_BYTES = 4 * (2 * _WIDTH * _WIDTH + 3 * 2 * _WIDTH * 2 * _WIDTH)


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Linear(2 * _WIDTH, _WIDTH)) for _ in range(3)]
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Sequential(*blocks), nn.Linear(_WIDTH, _WIDTH)).cuda()


def losses(
    flags: str, loss: Callable[..., torch.Tensor], after: Callable[..., None] = lambda _student, _teacher, _step: None
) -> tuple[list[float], list[torch.Tensor]]:
    student, teacher = net(1), net(2).requires_grad_(False)
    optimizer, found = torch.optim.AdamW(student.parameters(), lr=1e-3), []
    torch.manual_seed(3)
    with fit(Workload(student, optimizer), flags):
        for step in range(6):
            value = loss(student, teacher, torch.randn(32, _WIDTH, device="cuda"))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(value.item())
            after(student, teacher, step)
    assert all(p.is_cuda and type(p) is nn.Parameter for p in teacher.parameters())
    return found, [p.clone() for p in teacher.parameters()]


def _with_a_graph(student: nn.Module, teacher: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (student(inputs) - teacher(inputs)).square().mean()


def _without(student: nn.Module, teacher: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        wanted = teacher(inputs)
    return (student(inputs) - wanted).square().mean()


def _through(student: nn.Module, teacher: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (teacher(student(inputs)) - inputs).square().mean()


def _by_hand(student: nn.Module, teacher: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Weights are read past the calls of their layers."""
    return (student(inputs) - nn.functional.linear(inputs, teacher[0].weight, teacher[0].bias)).square().mean()


@pytest.mark.parametrize("flags", ["", "--accumulate 2", "--checkpoint", "--bf16"])
@pytest.mark.parametrize("loss", [_with_a_graph, _without, _through, _by_hand])
def test_losses_are_those_without_it(loss: Callable[..., torch.Tensor], flags: str) -> None:
    found, expected = losses(f"{flags} --offload frozen".strip(), loss), losses(flags, loss)
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


def _average(student: nn.Module, teacher: nn.Module, _step: int) -> None:
    with torch.no_grad():
        for kept, weight in zip(teacher.parameters(), student.parameters(), strict=True):
            kept.lerp_(weight, 0.1)


def _foreach(student: nn.Module, teacher: nn.Module, _step: int) -> None:
    with torch.no_grad():
        torch._foreach_lerp_([*teacher.parameters()], [*student.parameters()], 0.1)


def _data(student: nn.Module, teacher: nn.Module, _step: int) -> None:
    for kept, weight in zip(teacher.parameters(), student.parameters(), strict=True):
        kept.data.mul_(0.9).add_(weight.data, alpha=0.1)


def _once(_student: nn.Module, teacher: nn.Module, step: int) -> None:
    if step == 2:
        teacher.load_state_dict({name: value / 2 for name, value in teacher.state_dict().items()})


def _moved_by_hand(_student: nn.Module, teacher: nn.Module, step: int) -> None:
    if step == 2:
        teacher.cpu()
        assert teacher(torch.ones(1, _WIDTH)).device.type == "cpu"
        teacher.cuda()


@pytest.mark.parametrize("after", [_average, _foreach, _data, _once, _moved_by_hand])
def test_what_the_loop_does_to_them_holds(after: Callable[..., None]) -> None:
    found, expected = (losses(flags, _without, after) for flags in ("--offload frozen", ""))
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    return net(1), net(2).requires_grad_(False)


@pytest.mark.memory
def test_memory_is_free_between_uses(pair: tuple[nn.Module, nn.Module]) -> None:
    student, teacher = pair
    inputs = torch.randn(2, _WIDTH, device="cuda")
    expected = teacher(inputs)  # cuBLAS has its workspace by then
    before = torch.cuda.memory_allocated()
    with fit(Workload(student, torch.optim.AdamW(student.parameters())), "--offload frozen"):
        assert before - torch.cuda.memory_allocated() > 0.98 * _WEIGHTS_BYTES - 2**20
        assert torch.equal(teacher(inputs), expected)
        assert next(teacher.parameters()).device.type == "cuda"  # to the loop
        assert torch.equal(copy.deepcopy(teacher)(inputs), expected)
        assert all(value.is_cuda for value in teacher.state_dict().values())
    assert torch.equal(teacher(inputs), expected)


@pytest.mark.memory
def test_a_prediction_knows_what_leaves(pair: tuple[nn.Module, nn.Module]) -> None:
    student, _teacher = pair
    batch = torch.randn(8, _WIDTH, device="cuda"), torch.randn(8, _WIDTH, device="cuda")
    load = Workload(student, torch.optim.AdamW(student.parameters()), batch, nn.MSELoss())
    measured = {flags: measure(load, flags, 2).peak_allocated_bytes for flags in ("", "--offload frozen")}
    for flags, peak_bytes in measured.items():
        predicted = predict(load, flags)
        assert predicted.peak_allocated_bytes == pytest.approx(peak_bytes, rel=0.01)
    assert measured[""] - measured["--offload frozen"] > 0.95 * _WEIGHTS_BYTES
    frozen = frozen_beside(load)
    assert (
        predicted.notes[-1]
        == f"frozen models beside take up to {format_bytes(frozen.most_bytes)} more while they are used"
    )
    assert frozen.all_bytes > frozen.most_bytes > 4 * 2 * _WIDTH * 2 * _WIDTH


class _Captioner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(_WIDTH, _WIDTH).cuda()
        self.tower = net(4)[1].requires_grad_(False)
        self.head = nn.Linear(_WIDTH, 8).cuda()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.tower(self.before(inputs)))
        return found


@pytest.mark.memory
def test_peaks_of_a_frozen_part_are_predicted() -> None:
    model = _Captioner()
    batch = torch.randn(8, _WIDTH, device="cuda"), torch.randn(8, 8, device="cuda")
    load = Workload(model, torch.optim.AdamW(model.parameters()), batch, nn.MSELoss())
    before, after = (measure(load, flags, 2).peak_allocated_bytes for flags in ("", "--offload frozen"))
    block_bytes = 4 * 2 * _WIDTH * 2 * _WIDTH
    assert before - after > block_bytes
    assert predict(load).peak_allocated_bytes == pytest.approx(before, rel=0.01)
    # the block that is fetched ahead is in no prediction, as under --offload params
    assert 0 <= after - predict(load, "--offload frozen").peak_allocated_bytes < 1.05 * block_bytes
