"""What a live panel costs the loop it shows, and how soon a click on it counts; in a real kernel."""

from __future__ import annotations

import statistics
from dataclasses import asdict

from tests.bench.figures import Figure
from tests.helpers.live_kernel import LiveKernel, live_kernel
from tests.helpers.panel_kernel import TRAIN, Flip, KernelPanel, opened

_PENDING_SECONDS = 0.25
_SHARE = 0.01
# sums up what showing costs: whatever happens on the training thread once a step has ended
_WATCHED = """
control, shown = panel.source, [0.0, 0]
plain = control.steps.stepped
def stepped():
    began = time.perf_counter()
    frame = control.views.frame
    plain()
    shown[0] += time.perf_counter() - began
    shown[1] += control.views.frame - frame
control.steps.stepped = stepped
"""


def live(flips: int = 6, seconds: float = 20.0) -> list[Figure]:
    """A panel on a GPT-2 that trains on the CPU: what drawing it takes, and how long clicks take.

    Args:
        flips: how many clicks.
        seconds: how long to train for the share of time.
    """
    with live_kernel() as kernel:
        opened(kernel, layers=4, width=128, rows=8, tokens=96)
        return [_cost(kernel, seconds), *_clicks(kernel, flips)]


def _cost(kernel: LiveKernel, seconds: float) -> Figure:
    kernel.run(_WATCHED)
    before = kernel.value("[time.perf_counter(), control.feed.step]")
    kernel.run(TRAIN.format(flags="", seconds=seconds))
    spent, drawings, steps = kernel.value("[shown[0], shown[1], control.feed.step]")
    details = {
        "training seconds": seconds,
        "seconds spent on showing": spent,
        "drawings": drawings,
        "steps": steps - before[1],
    }
    return Figure("live panel while a cell trains (share of the time)", spent / seconds, _SHARE, details)


def _clicks(kernel: LiveKernel, flips: int) -> list[Figure]:
    panel = KernelPanel(kernel)
    subshell = kernel.subshell()
    kernel.value("[setattr(control, 'stepped', plain)] and 0")
    cell = kernel.send(TRAIN.format(flags="", seconds=600))
    done: list[Flip] = [panel.flip("checkpointing", index % 2 == 0, subshell) for index in range(flips)]
    kernel.interrupt()
    kernel.until_over(cell)
    step_seconds = kernel.value("[point.seconds for point in control.moment().points][-20:]")
    details = {
        "flips": [asdict(each) for each in done],
        "seconds a step, median": statistics.median(step_seconds),
    }
    slowest = max(each.pending_seconds for each in done)
    return [
        Figure(
            "click on a panel until it is pending, while a cell trains (seconds, slowest)",
            slowest,
            _PENDING_SECONDS,
            details,
        )
    ]
