"""Loops that change what the forward pass reads, between a call and its backward pass: as without memlab, or refused in words."""

from __future__ import annotations

import contextvars
import decimal
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import Workload, fit
from memlab.errors import RefusalError
from memlab.rescue.recovery import OtherResultsError
from memlab.rescue.rescuer import Rescuer
from memlab.runtime.fingerprints import CHANGED, Fingerprint, Saved, is_due
from memlab.techniques.tiling import tiling
from tests.rescue.faults import Faults

STEPS = 3
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
THREAD = threading.local()
SCALE = 1.0


class Config:
    scale = 1.0
    stack: list[float] = [1.0]  # noqa: RUF012 - one for all, as libraries have it


def exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


CHOSEN: Callable[[torch.Tensor], torch.Tensor] = exact


class Block(nn.Module):
    """A block that reads all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.own = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.own * SCALE * THREAD.scale * VARIABLE.get() * Config.scale * Config.stack[-1]
        scale *= float(os.environ.get("OF_THE_TEST", "1")) * (1.0 if self.training else 2.0)
        scale += float(decimal.Decimal(1) / 3)
        scale *= 1.0 + torch.are_deterministic_algorithms_enabled()
        return x + self.down(CHOSEN(F.silu(self.up(x) * scale)))


class Tower(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(3)))


@contextmanager
def changed(place: str, model: nn.Module, scale: float) -> Iterator[None]:
    """Context of a call; what is changed there is as before afterwards."""
    global SCALE, CHOSEN
    if place == "attribute":
        before = [block.own for block in model]
        for block in model:
            block.own = scale
        yield
        for block, own in zip(model, before, strict=True):
            block.own = own
    elif place == "global":
        SCALE = scale
        yield
        SCALE = 1.0
    elif place == "of the thread":
        THREAD.scale = scale
        yield
        THREAD.scale = 1.0
    elif place == "variable":
        token = VARIABLE.set(scale)
        yield
        VARIABLE.reset(token)
    elif place == "decimal":
        with decimal.localcontext() as context:
            context.prec = int(scale)
            yield
    elif place == "setting":
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)
    elif place == "mode":
        model.train()
        yield
        model.eval()
    elif place == "mode of a part":
        model[1].eval()
        yield
        model[1].train()
    elif place == "what trains":
        model[1].requires_grad_(False)
        yield
        model[1].requires_grad_(True)
    elif place == "what trained":
        yield
        model[1].requires_grad_(False)
    elif place == "class":
        with mock.patch.object(Config, "scale", scale):
            yield
    elif place == "stack":
        Config.stack.append(scale)
        yield
        Config.stack.pop()
    elif place == "function":
        CHOSEN = torch.sin
        yield
        CHOSEN = exact
    elif place == "patch":
        with mock.patch.object(F, "silu", torch.tanh):
            yield
    elif place == "environment":
        with mock.patch.dict(os.environ, {"OF_THE_TEST": str(scale)}):
            yield


RESTORED = (
    "attribute",
    "global",
    "of the thread",
    "variable",
    "decimal",
    "setting",
    "mode",
    "mode of a part",
    "what trains",
    "what trained",
    "class",
    "stack",
)
OTHERS = ("function", "patch", "environment")
SETTINGS = {
    "--accumulate 2": (),
    "--checkpoint": (),
    "--checkpoint selective --accumulate 2": (),
    "--tile 2": (),
    "--offload activations,optimizer": (),
    "out of memory, whole batches": (40, 75),
    "out of memory": (40, 75),
}
SERVES_ALL = ("--offload activations,optimizer",)


def run(place: str, setting: str | None, calls: int, faults: Sequence[int] = ()) -> list[Any]:
    """Losses and weights of a loop; None for one without memlab."""
    torch.manual_seed(1)
    model = Tower()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []

    def train() -> None:
        for step, rows in enumerate(torch.randn(STEPS, calls, 6, 8)):
            outputs = []
            for number in range(calls):
                with changed(place, model, 2.0 + step + number):
                    outputs.append(model(rows[number]))
            loss = torch.stack([F.mse_loss(output, torch.ones_like(output)) for output in outputs]).sum()
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.train().requires_grad_(True)

    if setting is None:
        train()
    else:
        is_rescued = setting.startswith("out of memory")
        rescue = Rescuer(("accumulation",) if "whole" in setting else ()) if is_rescued else False
        workload = Workload(model, optimizer)
        with fit(workload, "" if is_rescued else setting, rescue=rescue) as session, Faults(faults):
            train()
            assert not is_rescued or session.rescuer is None or session.rescuer.rescues
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.fixture(autouse=True)
def as_ever(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiling, "LARGE_BYTES", 0)
    THREAD.scale = 1.0
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    assert (SCALE, CHOSEN, Config.scale, Config.stack) == (1.0, exact, 1.0, [1.0])


@pytest.mark.few(30)
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("place", [*RESTORED, *OTHERS])
def test_gradients_are_those_of_the_forward_pass(place: str, setting: str, calls: int) -> None:
    expected = run(place, None, calls)
    is_served = place in RESTORED or setting in SERVES_ALL
    with nullcontext() if is_served else pytest.raises((RefusalError, OtherResultsError)) as caught:
        found = run(place, setting, calls, SETTINGS[setting])
    if caught is not None:
        assert " computed something else when it ran again" in str(caught.value)
        assert CHANGED in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        else:
            assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3, 5), (64, 3, 130)])
def test_what_is_alike(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape).to(dtype) + 1
    for each in (tensor, tensor.mT if len(shape) > 1 else tensor):
        found = Fingerprint.of(each)
        assert found is not None
        assert found.is_like(Fingerprint.of(each.clone()))
        assert found.is_like(None)
        assert not found.is_like(Fingerprint.of(each * 1.1))
        assert not found.is_like(Fingerprint.of(-each))
        assert not found.is_like(Fingerprint.of(each * float("nan")))
    infinite = tensor * float("nan")
    one = Fingerprint.of(infinite)
    assert one is not None
    assert one.is_like(Fingerprint.of(infinite))


def test_what_has_no_fingerprint() -> None:
    for value in (None, "text", 3, torch.ones(2, dtype=torch.long), torch.ones(0), torch.ones(2, 2).to_sparse()):
        assert Fingerprint.of(value) is None


@pytest.mark.parametrize("setting", ["--accumulate 3", "--checkpoint", "--tile 2"])
def test_a_first_change_is_noticed_whenever_it_comes(setting: str) -> None:
    model = Tower()
    with fit(Workload(model, torch.optim.SGD(model.parameters())), setting):
        for step in range(7):
            with changed("patch", model, 2.0) if step == 6 else nullcontext():
                loss = F.mse_loss(model(torch.ones(6, 8)), torch.zeros(6, 8))
            with pytest.raises(RefusalError, match="computed something else") if step == 6 else nullcontext():
                loss.backward()


def test_what_is_not_compared_is_not_looked_at_when_it_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(torch.ones(2), 5, "checkpointing", "Block")  # as every tensor on a GPU in the fifth run
    monkeypatch.setattr(Fingerprint, "of", lambda *_: pytest.fail("looking has the host wait"))
    assert saved == torch.zeros(2)
    with pytest.raises(RefusalError, match="computed something else"):
        _ = saved == torch.zeros(3)


def test_ever_fewer_runs_are_compared_on_a_gpu() -> None:
    assert [number for number in range(1, 70) if is_due(number)] == [1, 2, 3, 4, 8, 16, 32, 64]
