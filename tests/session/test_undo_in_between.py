"""An undo between a call and its backward pass: the loop goes on as without memlab, or is told why it cannot."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from memlab import Workload, fit
from memlab.errors import RefusalError
from memlab.rescue.rescuer import Rescuer
from memlab.techniques.tiling import tiling
from tests.loops.cases import Tower
from tests.rescue.faults import Faults

EXACT = (
    "--checkpoint", "--checkpoint selective", "--offload activations", "--offload params", "--offload optimizer", "--tile 2",
    "--release-grads", "--checkpoint --offload activations", "--tile 2 --offload activations",
)  # fmt: skip
SETTINGS = ["--accumulate 2", *EXACT, *(f"--accumulate 2 {setting}" for setting in EXACT), "out of memory"]


class Counting(Tower):
    """A model that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(classes=8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(inputs)


def run(setting: str | None) -> list[torch.Tensor]:
    """Weights, buffers and losses after a loop whose plan goes within its third step."""
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows, losses = torch.randn(4, 8, 16), []
    is_rescued = setting == "out of memory"
    plan = "" if is_rescued or setting is None else setting
    session = fit(Workload(model, optimizer), plan, rescue=Rescuer() if is_rescued else False) if setting else None
    for step in range(4):
        with Faults((10,)) if is_rescued and step == 2 else nullcontext():
            loss = F.cross_entropy(model(rows[step]), torch.arange(8))
        if session is not None and step == 2:
            assert session.rescuer is None or session.rescuer.rescues
            session.undo()
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*losses, *(tensor.detach() for tensor in (*model.parameters(), *model.buffers()))]


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "LARGE_BYTES", 0)


@pytest.mark.few(8)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_loop_goes_on(setting: str) -> None:
    for found, expected in zip(run(setting), run(None), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("setting", ["--precision pure-bf16", "--accumulate 2 --precision pure-bf16"])
def test_what_was_computed_in_pure_bf16_says_that_it_is_over(setting: str) -> None:
    with pytest.raises(RefusalError) as caught:
        run(setting)
    assert str(caught.value) == (
        "precision: this was computed with weights in pure bf16, which was taken off before its backward pass; "
        "compute it again, or take pure bf16 off after backward()"
    )
