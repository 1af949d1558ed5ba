"""A real IPython shell with memlab loaded, and small loops to run in its cells."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("IPython", reason="the magics need IPython")

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from memlab.jupyter.magic import unload

MAKE = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU(),
                            torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters())
inputs, target = torch.randn(12, 16), torch.randint(0, 4, (12,))
"""

STEP = """
loss = torch.nn.functional.cross_entropy(model(inputs), target)
loss.backward()
optimizer.step()
optimizer.zero_grad()
"""

TRAIN = f"for _ in range(4):\n{''.join(f'    {line}' for line in STEP.strip().splitlines(keepends=True))}\n"


@dataclass
class Ran:
    """How a cell ended and what it printed."""

    result: Any
    out: str
    err: str

    @property
    def error(self) -> BaseException | None:
        return self.result.error_before_exec or self.result.error_in_exec


Cell = Callable[[str], Ran]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A shell of its own, with `%load_ext memlab` done; sessions are undone when the test ends."""
    # a doctest earlier in this process leaves its last value there, and IPython then keeps its own `_` out
    monkeypatch.delattr(builtins, "_", raising=False)
    before = {name: getattr(sys, name) for name in ("displayhook", "excepthook")}
    main = sys.modules["__main__"]
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.xmode = "Plain"  # IPython's own takes a second; `%xmode Context` where it is looked at
    made = InteractiveShell.instance(config=config)
    made.run_line_magic("load_ext", "memlab")
    # predictions beside receipts have tests of their own
    made.run_line_magic("config", "MemLab.predict = False")
    yield made
    unload(made)
    _forget_results(made)
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main
    for name, value in before.items():
        setattr(sys, name, value)


@pytest.fixture
def cell(shell: Any, capsys: pytest.CaptureFixture[str]) -> Cell:
    """Run a cell as a front end does."""

    def run(source: str) -> Ran:
        capsys.readouterr()
        result = shell.run_cell(source.strip("\n"), store_history=True)
        captured = capsys.readouterr()
        return Ran(result, captured.out, captured.err)

    return run


@pytest.fixture
def made(cell: Cell) -> Cell:
    """The same with a model, an optimizer and a batch in the notebook."""
    assert cell(MAKE).error is None
    return cell


def _forget_results(shell: Any) -> None:
    shell.reset(new_session=False)
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
