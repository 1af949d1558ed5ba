"""The panel in a real kernel: flips that arrive while a cell trains, and flips that have to wait for its end."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

for package in ("ipykernel", "ipywidgets", "anywidget", "transformers"):
    pytest.importorskip(package, reason=f"needs {package}")

from tests.helpers.live_kernel import LiveKernel, live_kernel  # noqa: E402
from tests.helpers.panel_kernel import TRAIN, KernelPanel, opened  # noqa: E402


@pytest.fixture(scope="module")
def kernel() -> Iterator[LiveKernel]:
    with live_kernel() as made:
        opened(made)
        yield made


def has_subshells(kernel: LiveKernel) -> bool:
    return bool(kernel.value("getattr(get_ipython().kernel, '_supports_kernel_subshells', False)"))


@pytest.fixture(autouse=True)
def as_written(kernel: LiveKernel) -> None:
    """Nothing is in force, whichever test came before."""
    kernel.run("stop = False\n%memfit undo")


def test_a_flip_on_a_subshell_is_pending_and_then_applied_while_the_cell_trains(kernel: LiveKernel) -> None:
    if not has_subshells(kernel):
        pytest.skip("this ipykernel has no subshells")
    panel = KernelPanel(kernel)
    subshell = kernel.subshell()
    cell = kernel.send(TRAIN.format(flags="", seconds=40))
    on, off = (panel.flip("checkpointing", value, subshell) for value in (True, False))
    assert "applied at step" in on.said
    assert "off since step" in off.said
    assert not kernel.is_over(cell)
    kernel.interrupt()
    kernel.until_over(cell)
    kernel.delete_subshell(subshell)
    log = kernel.value("[str(entry) for entry in panel.source.model.session.log]")
    assert [entry.partition(": ")[2] for entry in log[-2:]] == [
        "as written → --checkpoint",
        "--checkpoint → as written",
    ]


def test_a_flip_without_a_subshell_is_applied_when_the_cell_has_ended(kernel: LiveKernel) -> None:
    panel = KernelPanel(kernel)
    cell = kernel.send(TRAIN.format(flags="", seconds=3))
    panel.click("accumulation", True)
    _, said = panel.until_said("accumulation", "applied at step")
    assert kernel.is_over(cell)
    assert kernel.value("panel.source.model.session.plan.label") == "--accumulate 4"
    assert "applied at step" in said


def test_a_flip_reaches_a_background_cell_without_a_subshell(kernel: LiveKernel) -> None:
    panel = KernelPanel(kernel)
    kernel.run(TRAIN.format(flags="--background", seconds=60))
    # the run begins in its own thread, after the cell has returned
    deadline = time.monotonic() + 60
    while not kernel.value("panel.source.steps.world").startswith("the cell trains in the background"):
        assert time.monotonic() < deadline, "the panel never said that the cell trains in the background"
    assert "applied at step" in panel.flip("accumulation", True, None).said
    kernel.run("stop = True")
    kernel.run("%memfit wait")
    assert kernel.value("panel.source.model.session.plan.label") == "--accumulate 4"
