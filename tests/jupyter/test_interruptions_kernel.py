"""The interrupt button at any moment of a training cell, in a real kernel: with and without a panel, and beside a background cell.

``MEMLAB_INTERRUPTIONS=20`` presses it so often in each of them, under every plan, in plain cells too.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

for package in ("ipykernel", "ipywidgets", "anywidget"):
    pytest.importorskip(package, reason=f"needs {package}")

from tests.helpers.kernel import frames_of_memlab  # noqa: E402
from tests.helpers.live_kernel import LiveKernel, live_kernel  # noqa: E402

pytestmark = pytest.mark.full

_INTERRUPTIONS = int(os.environ.get("MEMLAB_INTERRUPTIONS", "4"))
_IS_LONG = "MEMLAB_INTERRUPTIONS" in os.environ
_SETUP = """
%load_ext memlab
import torch, torch.nn as nn, torch.nn.functional as F
torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)))
        self.head = nn.Linear(32, 16)

    def forward(self, inputs, targets):
        return F.cross_entropy(self.head(self.blocks(inputs)), targets)

def made():
    torch.manual_seed(0)
    model = Net().train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

def counts(optimizer):
    return sorted({int(state["step"]) for state in optimizer.state.values()})
"""
# what a step does depends on its number alone, so that a loop may be left and entered again
_TRAIN = """
%%memfit {flags}
number = max(counts(optimizer), default=0)
print("begun")
while number < {steps} and not stop:
    torch.manual_seed(number)
    inputs, targets = torch.randn(8, 32), torch.randint(0, 16, (8,))
    optimizer.zero_grad()
    loss = model(inputs, targets)
    loss.backward()
    optimizer.step()
    number += 1
"""
# without flags the loop's own update is interrupted as torch has it, in the middle
_PLANS = (
    "--accumulate 2",
    "--checkpoint",
    "--offload optimizer",
    "--offload activations,params",
    "--release-grads",
    "--release-grads --offload optimizer",
    "--bf16 --adam8bit",
    "--precision pure-bf16",
    "--optim adafactor",
    "--accumulate 2 --checkpoint --offload optimizer,activations",
)
_CELLS = [(flags, False) for flags in (_PLANS if _IS_LONG else _PLANS[::2])]
_PANELS = [(flags, True) for flags in (_PLANS if _IS_LONG else _PLANS[1:8:3])]
_IN_BACKGROUND = ("", *(_PLANS if _IS_LONG else ("--release-grads --offload optimizer", _PLANS[-1])))


@pytest.fixture(scope="module")
def kernel() -> Iterator[LiveKernel]:
    with live_kernel() as made:
        made.run(_SETUP)
        yield made


def interrupted(kernel: LiveKernel, cell: str, after_seconds: float) -> None:
    """Press the button, and hold what the user sees against what a plain cell shows."""
    kernel.until_printed(cell, "begun")
    time.sleep(after_seconds)
    kernel.interrupt()
    kernel.until_over(cell)
    assert kernel.errors(cell) == ["KeyboardInterrupt"], kernel.text(cell)[-300:]
    (error,) = [m["content"] for m in kernel.messages[cell] if m["msg_type"] == "error"]
    shown = "\n".join(error["traceback"])
    assert not frames_of_memlab(shown), shown


@pytest.mark.parametrize(("flags", "has_panel"), [*_CELLS, *_PANELS])
def test_the_button_leaves_whole_steps(kernel: LiveKernel, flags: str, has_panel: bool) -> None:
    drawn = random.Random(f"{flags} {has_panel}")
    kernel.run("model, optimizer = made()\nstop = False")
    if has_panel:
        kernel.run("%memfit panel")
    for _ in range(_INTERRUPTIONS // (1 + has_panel)):
        cell = kernel.send(_TRAIN.format(flags=flags, steps=10**9))
        interrupted(kernel, cell, drawn.uniform(0.0, 0.3))
        assert len(kernel.value("counts(optimizer)")) <= 1
    (steps,) = kernel.value("counts(optimizer)")
    kernel.run("trained, by = model, optimizer")
    kernel.run("%memfit undo")
    kernel.run("model, optimizer = made()")
    kernel.run(_TRAIN.format(flags=flags, steps=steps))
    same = "all(torch.equal(a, b) for a, b in zip(trained.state_dict().values(), model.state_dict().values()))"
    kernel.run("%memfit undo")
    assert kernel.value("counts(optimizer)") == [steps]
    assert kernel.value(same)
    assert kernel.value("'memlab' in repr([vars(m) for m in trained.modules()])") is False


@pytest.mark.parametrize("has_panel", [False, True])
def test_the_button_in_a_cell_without_a_plan(kernel: LiveKernel, has_panel: bool) -> None:
    drawn = random.Random(has_panel)
    kernel.run("model, optimizer = made()\nstop = False")
    if has_panel:
        kernel.run("%memfit panel")
    for _ in range(_INTERRUPTIONS // 2):
        interrupted(kernel, kernel.send(_TRAIN.format(flags="", steps=10**9)), drawn.uniform(0.0, 0.3))
    kernel.run("last = 3 + max(counts(optimizer), default=0)")
    kernel.run(_TRAIN.format(flags="", steps="last"))  # the next cell trains on
    assert kernel.value("max(counts(optimizer)) == last")
    kernel.run("%memfit undo")
    assert kernel.value("'memlab' in repr([vars(m) for m in model.modules()])") is False


@pytest.mark.parametrize("flags", _IN_BACKGROUND)
def test_a_background_cell_is_left_by_cancelling_alone(kernel: LiveKernel, flags: str) -> None:
    drawn = random.Random(flags)
    kernel.run("model, optimizer = made()\nstop = False")
    for _ in range(max(3, _INTERRUPTIONS // 2)):
        kernel.run(_TRAIN.format(flags=f"{flags} --background".strip(), steps=10**9))
        interrupted_wait = kernel.send("%memfit wait")
        time.sleep(drawn.uniform(0.2, 0.6))
        kernel.interrupt()
        kernel.until_over(interrupted_wait)
        assert kernel.errors(interrupted_wait) == ["KeyboardInterrupt"]
        before = kernel.value("max(counts(optimizer), default=0)")
        waits = iter(range(100))  # the first step of some plans takes its time
        while kernel.value("max(counts(optimizer), default=0)") == before:
            assert next(waits, None) is not None, "it trains no longer"
            time.sleep(0.1)
        kernel.run("%memfit cancel")
        kernel.run("%memfit wait")
        assert len(kernel.value("counts(optimizer)")) == 1
    (steps,) = kernel.value("counts(optimizer)")
    kernel.run("trained = model")
    kernel.run("%memfit undo")
    kernel.run("model, optimizer = made()")
    kernel.run(_TRAIN.format(flags=flags, steps=steps))
    kernel.run("%memfit undo")
    same = "all(torch.equal(a, b) for a, b in zip(trained.state_dict().values(), model.state_dict().values()))"
    assert kernel.value(same)
