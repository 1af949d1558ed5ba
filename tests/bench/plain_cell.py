"""What `%%memfit` without flags costs a cell, in a real kernel: CPU time against the same cell without it, in turns."""

from __future__ import annotations

import statistics

from tests.bench.figures import Figure
from tests.helpers.live_kernel import LiveKernel, live_kernel

_MAKE = """
import time, torch, torch.nn as nn
torch.set_num_threads(1)
%load_ext memlab
model = nn.Sequential(nn.Linear(64, {width}), nn.ReLU(), nn.Linear({width}, {width}), nn.ReLU(), nn.Linear({width}, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
"""
_TRAIN = """
for step in range({steps}):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_RATIO = 1.05
_MOST_SECONDS = 0.3


def plain_cell(turns: int) -> list[Figure]:
    """A cell of 500 steps of about a millisecond, and one of about five seconds.

    Args:
        turns: how often the two are run, one after the other.
    """
    return [
        *_figures("500 steps of 1 ms", width=256, steps=500, turns=turns),
        *_figures("5 s", width=768, steps=1000, turns=max(4, turns // 4)),
    ]


def _figures(what: str, *, width: int, steps: int, turns: int) -> list[Figure]:
    with live_kernel() as kernel:
        kernel.run(_MAKE.format(width=width))
        cell = _TRAIN.format(steps=steps)
        pairs = [(_seconds(kernel, cell), _seconds(kernel, "%%memfit\n" + cell)) for _ in range(turns + 1)][1:]
    plain, watched = zip(*pairs, strict=True)
    more = statistics.median(w - p for p, w in pairs)
    details = {"plain, CPU seconds": plain, "%%memfit, CPU seconds": watched}
    return [
        Figure(f"%%memfit without flags, a cell of {what} (CPU time, ratio)", 1 + more / min(plain), _RATIO, details),
        Figure(f"%%memfit without flags, a cell of {what} (CPU seconds more)", more, _MOST_SECONDS, {}),
    ]


def _seconds(kernel: LiveKernel, cell: str) -> float:
    """CPU time of the kernel while a cell runs."""
    began = float(kernel.value("time.process_time()"))
    kernel.run(cell)
    return float(kernel.value("time.process_time()")) - began
