"""Random clicks on a panel, at any step and between cells, and interrupts: the loop never dies, lossless settings leave it as it is, numbers agree."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from memlab.jupyter.panel import Panel
from memlab.live.control import Control, control_of
from memlab.plan import FIELDS, Plan
from memlab.records.live_state import Activity
from memlab.runtime.workload import Workload
from memlab.session import sessions
from memlab.units import format_bytes
from tests.helpers.hand import Hand
from tests.helpers.stages import Playing
from tests.jupyter.conftest import Cell

for package in ("ipywidgets", "anywidget"):
    pytest.importorskip(package, reason=f"needs {package}")

_CELLS = 3
_DATA = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, relu
torch.manual_seed(0)
def data(steps):
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        rows = 8 if step % 5 else 5
        yield torch.randn(rows, 16, generator=generator), torch.randint(0, 4, (rows,), generator=generator)
"""
_BLOCKS = "model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)], nn.Linear(16, 4))"
_NORMED = "model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))"
_ATTENDING = """
class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 4)
    def forward(self, x, y=None):
        x = x[:, None]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x[:, 0])
        return logits, None if y is None else cross_entropy(logits, y)
model = Attending()
"""
_CONVOLUTIONS = "model = nn.Sequential(nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))"
_LOSS = "loss = cross_entropy(model(x), y)"
_UPDATE = "optimizer.step(); optimizer.zero_grad()"
# the model and what the loop does with a batch; the loss is kept as `loss`
_LOOPS = {
    "plain": (_BLOCKS, _LOSS, "loss.backward()", _UPDATE),
    "batch norm": (_NORMED, _LOSS, "loss.backward()", _UPDATE),
    "clips": (_CONVOLUTIONS, _LOSS, "loss.backward()", "nn.utils.clip_grad_norm_(model.parameters(), 0.5)", _UPDATE),
    "reads gradients late": (_BLOCKS, "optimizer.zero_grad()", _LOSS, "loss.backward()", "optimizer.step()", "norm = model[-1].weight.grad.norm()"),
    "closure": (_BLOCKS, "def closure():\n        optimizer.zero_grad(); loss = cross_entropy(model(x), y); loss.backward(); return loss", "loss = optimizer.step(closure)"),
    "accumulates": (_BLOCKS, "loss = cross_entropy(model(x), y) / 2", "loss.backward()", "if step % 2: optimizer.step(); optimizer.zero_grad()"),
    "penalty": (_BLOCKS, "loss = cross_entropy(model(x), y) + 1e-3 * sum(p.square().sum() for p in model.parameters())", "loss.backward()", _UPDATE),
    "attends": (_ATTENDING, "logits, loss = model(x, y)", "loss.backward()", _UPDATE),
    "evaluates": (_NORMED, _LOSS, "loss.backward()", _UPDATE, "model.eval(); right = (model(x).argmax(-1) == y).float().mean(); model.train()"),
}  # fmt: skip
_OPTIMIZERS = ("AdamW(model.parameters(), lr=1e-2, eps=1e-3)", "SGD(model.parameters(), lr=1e-2, momentum=0.9)")


class Clicks:
    """A hand on a panel, which does what a reader could: what is greyed out is left alone."""

    def __init__(self, panel: Panel, control: Control, drawn: random.Random) -> None:
        self.hand, self.control, self._drawn = Hand(panel), control, drawn
        self.done: list[str] = []
        self.plans: list[Plan] = []

    def at(self, step: int) -> None:
        """Click now and then, on this thread or beside it, as a front end's messages come; or interrupt the cell."""
        if self._drawn.random() < 0.6:
            self.done.append(f"@{step}")
            if self._drawn.random() < 0.5:
                self.click()
            else:
                clicking = threading.Thread(target=self.click)
                clicking.start()
                clicking.join()
        moment = self.control.moment()
        self.plans += [moment.plan, *([moment.pending] if moment.pending is not None else [])]
        if self._drawn.random() < 0.05:
            self.done.append("interrupt")
            raise KeyboardInterrupt

    def click(self) -> None:
        hand, drawn = self.hand, self._drawn
        field = drawn.choice(FIELDS).name
        buttons = ["copy", "undo", "find", "run"]
        if self.control.moment().activity is not Activity.TRAINING:
            buttons.append("cancel")  # which would end the cell, as it says
        kind = drawn.choices(("box", "choice", "budget", "button"), (4, 4, 1, 2))[0]
        used = field
        if kind == "box":
            hand.flip(field, on=not hand.setting(field)["on"])
        elif kind == "choice":
            used = f"{field} {(text := drawn.choice(hand.choices(field)))}"
            hand.choose(field, text)
        elif kind == "budget" and hand.shown["budget"]["known"]:
            hand.send("budget", position=drawn.randint(0, 200))
        elif kind == "button":
            used = drawn.choice([each for each in buttons if hand.can_press(each)])
            hand.press(used)
        self.done.append(f"{kind} {used}")

    @property
    def are_lossless(self) -> bool:
        """Whether no plan that was in force may change losses by more than rounding."""
        return all(
            Plan(
                precision=plan.precision,
                optimizer=plan.optimizer,
                batchnorm=plan.batchnorm,
                adapters=plan.adapters,
            )
            == Plan()
            for plan in self.plans
        )


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    for session in sessions():
        session.undo()


@pytest.mark.few(1, full=18)
@pytest.mark.parametrize("seed", range(100))
def test_a_session(seed: int, cell: Cell, shell: Any, clean: None) -> None:
    drawn = random.Random(seed)
    name, (model, *lines) = list(_LOOPS.items())[seed % len(_LOOPS)]
    steps, optimizer = drawn.randint(5, 10), drawn.choice(_OPTIMIZERS)
    make = f"{_DATA}\n{model}\noptimizer = torch.optim.{optimizer}"
    # goes on where an interrupt has ended it
    lines = ["if step < len(losses): continue", "click(step)", *lines, "losses.append(float(loss))"]
    body = "".join(f"    {line}\n" for line in lines)
    loop = f"for step, (x, y) in enumerate(data({steps})):\n{body}"
    names = shell.user_ns

    names["click"] = lambda _step: None
    assert cell(make).error is None
    expected = [_losses(cell, names, loop) for _ in range(_CELLS)]
    assert cell(make).error is None
    control = control_of(names["model"])
    control.begin(Workload(names["model"], names["optimizer"]))
    control.loop.stage = Playing()
    panel = Panel(control)
    clicks = Clicks(panel, control, drawn)
    names["click"] = clicks.at
    try:
        for untouched in expected:
            if drawn.random() < 0.4:
                clicks.done.append("between")
                clicks.click()
            found = _losses(cell, names, "%%memfit\n" + loop)
            said = f"{name}: {clicks.done}"
            assert len(found) == steps, said
            if clicks.are_lossless:
                assert found == pytest.approx(untouched, rel=1e-4, abs=1e-5), said
            _agree(control, cell("%memfit report").out, panel, said)
        assert cell("%memfit undo all").error is None
    finally:
        panel.close()
    parts = [type(value).__module__ for module in names["model"].modules() for value in vars(module).values()]
    assert not any(part.startswith("memlab") for part in parts)


def _losses(cell: Cell, names: dict[str, Any], loop: str) -> list[float]:
    names["losses"] = []
    while isinstance((ran := cell(loop)).error, KeyboardInterrupt):
        pass
    assert ran.error is None, ran.out + ran.err
    return list(names["losses"])


def _agree(control: Control, report: str, panel: Panel, said: str) -> None:
    """Panel, report and sessions have the same plans and the same numbers."""
    moment = control.moment()
    assert not panel.widget.controls["errors"], said
    assert [str(session.plan) for session in sessions()] == [str(moment.plan)] * len(sessions()), said
    for each in moment.measurements:
        size = format_bytes(each.peak_allocated_bytes)
        assert size in report, f"{each.plan}: {size}; {said}\n{report}"
        assert size in panel.widget.table, f"{each.plan}: {size}; {said}"
