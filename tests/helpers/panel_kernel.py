"""A panel in a real kernel, flipped by messages as a front end sends them, with the times they take."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from memlab.plan import FIELDS
from tests.helpers.live_kernel import LiveKernel

MAKE = """
%load_ext memlab
import logging, time, torch
logging.disable(logging.WARNING)
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer={layers}, n_embd={width}, n_head=4, vocab_size=2048, n_positions=128))
model.config.loss_type = "ForCausalLM"
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
batch = torch.randint(0, 2048, ({rows}, {tokens}))
batch = dict(input_ids=batch, labels=batch, use_cache=False)
stop = False
"""
OPEN = "%memfit panel"
TRAIN = """
%%memfit {flags}
deadline = time.monotonic() + {seconds}
while time.monotonic() < deadline and not stop:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_FIND = """
from memlab.jupyter.panel import panels
panel = list(panels()._open.values())[-1]
"""


@dataclass(frozen=True)
class Flip:
    """One flip of a check box.

    Args:
        pending_seconds: until the panel said that it is pending.
        applied_seconds: until it said at which step it was applied.
        said: what it said.
    """

    pending_seconds: float
    applied_seconds: float
    said: str


def opened(kernel: LiveKernel, *, layers: int = 2, width: int = 64, rows: int = 4, tokens: int = 64) -> None:
    """Make a model and a panel on it."""
    kernel.run(MAKE.format(layers=layers, width=width, rows=rows, tokens=tokens))
    kernel.run(OPEN)
    kernel.run(_FIND)


class KernelPanel:
    """The panel of a kernel, as its page sees it."""

    def __init__(self, kernel: LiveKernel) -> None:
        self._kernel = kernel
        self._comm = str(kernel.value("panel.widget.comm.comm_id"))

    def click(self, field: str, value: bool, subshell: str | None = None) -> None:
        """Click on a setting's box."""
        self._kernel.tell(self._comm, {"kind": "flip", "field": field, "on": value}, subshell)

    def until_said(self, field: str, text: str) -> tuple[float, str]:
        """Wait until the words beside a setting have a text in them; returns when, and the words."""
        place = [spec.name for spec in FIELDS].index(field)

        def words(state: dict[str, Any]) -> str:
            return str(state["controls"]["settings"][place]["said"]) if "controls" in state else ""

        return self._kernel.until_shown(self._comm, words, text)

    def flip(self, field: str, value: bool, subshell: str | None) -> Flip:
        """Click on a setting's box, and wait until the panel has said what has become of it."""
        began = time.perf_counter()
        self.click(field, value, subshell)
        pending = self.until_said(field, "pending")
        applied = self.until_said(field, "applied at step" if value else "off since step")
        return Flip(pending[0] - began, applied[0] - began, applied[1])
