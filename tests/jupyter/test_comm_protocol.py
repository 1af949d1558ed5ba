"""Clicks and cells, message by message, in a real kernel: what arrives when, and on which thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("ipykernel", reason="needs ipykernel")
pytest.importorskip("ipywidgets", reason="needs ipywidgets")
pytest.importorskip("jupyter_client", reason="needs jupyter_client")

from tests.helpers.live_kernel import LiveKernel, live_kernel
from tests.jupyter.conftest import MAKE, STEP

PANEL = """
import threading, time
import ipywidgets
from IPython import get_ipython
from memlab.jupyter.comms import Hearing, let_through
from memlab.jupyter.main_thread import MainThread

notes, hooks = [], []
running = ""                         # the cell that runs
stage = MainThread(get_ipython())
hearing = Hearing(get_ipython().kernel)
get_ipython().events.register("post_execute", lambda: hooks.append(threading.current_thread().name))

def names():
    return [name for name, *_ in notes]

def noted(name):
    def callback(change):
        if name.startswith("let"):
            hearing.heard()
        if not change["new"]:
            return
        if name == "idle":
            stage.when_idle(lambda: (print("done when idle"), notes.append(("work", on(), running))))
        notes.append((name, on(), running))
    return callback

def on():
    is_main = threading.current_thread() is threading.main_thread()
    return "main" if is_main else "beside"

def until(is_so, seconds=30):
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)

boxes = {name: ipywidgets.Checkbox(description=name) for name in ("let", "let too", "idle", "plain")}
for name, box in boxes.items():
    box.observe(noted(name), "value")
for name in ("let", "let too", "idle"):
    let_through(boxes[name])
for box in boxes.values():
    box.description += "."           # the main shell sends on every comm
"""

LONG = """
running = "long"
print("begun")
until(lambda: {until})
during = list(notes)
running = ""
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[LiveKernel]:
    with live_kernel() as started:
        yield started


@pytest.fixture(scope="module")
def maker(kernel: LiveKernel) -> str:
    """The cell that made the panel."""
    return kernel.run(f"%load_ext memlab\n{PANEL}")


@pytest.fixture
def comms(kernel: LiveKernel, maker: str) -> dict[str, str]:
    """Ids of the check boxes' comms; nothing noted so far."""
    kernel.run("notes.clear(); hooks.clear()\nfor box in boxes.values():\n    box.value = False\nnotes.clear()")
    ids: dict[str, str] = kernel.value("{name: box.comm.comm_id for name, box in boxes.items()}")
    return ids


@pytest.fixture
def subshell(kernel: LiveKernel) -> Iterator[str]:
    if not kernel.value("bool(getattr(get_ipython().kernel, '_supports_kernel_subshells', False))"):
        pytest.skip("this ipykernel has no subshells")
    made = kernel.subshell()
    yield made
    kernel.delete_subshell(made)


def test_a_click_over_a_subshell_arrives_while_a_cell_runs(
    kernel: LiveKernel, comms: dict[str, str], subshell: str
) -> None:
    cell = kernel.send(LONG.format(until="'let' in names()"))
    kernel.until_printed(cell, "begun")
    kernel.click(comms["let too"], {"value": True})  # to the main shell, ahead of the other one
    kernel.click(comms["let"], {"value": True}, subshell)
    kernel.until_over(cell)
    assert kernel.value("during") == [["let", "beside", "long"]]
    assert kernel.value("notes")[1:] == [["let too", "main", ""]]
    assert kernel.value("hearing.world.name") == "AT_ONCE"


def test_without_letting_through_ipykernel_sends_it_to_the_busy_shell(
    kernel: LiveKernel, comms: dict[str, str], subshell: str
) -> None:
    if not kernel.value("hasattr(boxes['plain'].comm, '_reply_subshell_for')"):
        pytest.skip("this ipykernel redirects no message")
    cell = kernel.send(LONG.format(until="'let' in names()"))
    kernel.until_printed(cell, "begun")
    kernel.click(comms["plain"], {"value": True}, subshell)
    kernel.click(comms["let"], {"value": True}, subshell)
    kernel.until_over(cell)
    assert kernel.value("during") == [["let", "beside", "long"]]
    assert kernel.value("notes")[1:] == [["plain", "main", ""]]


def test_a_click_beside_a_cell_does_not_trigger_its_hooks(
    kernel: LiveKernel, comms: dict[str, str], subshell: str
) -> None:
    cell = kernel.send(LONG.format(until="'let' in names()"))
    kernel.until_printed(cell, "begun")
    kernel.click(comms["let"], {"value": True}, subshell)
    kernel.until_over(cell)
    assert kernel.value("during") == [["let", "beside", "long"]]
    assert set(kernel.value("hooks")) == {"MainThread"}


def test_work_for_the_idle_main_thread_waits_for_the_cell(
    kernel: LiveKernel, comms: dict[str, str], subshell: str, maker: str
) -> None:
    cell = kernel.send(LONG.format(until="'idle' in names()"))
    kernel.until_printed(cell, "begun")
    kernel.click(comms["idle"], {"value": True}, subshell)
    kernel.until_printed(maker, "done when idle")
    assert kernel.value("during") == [["idle", "beside", "long"]]
    assert kernel.value("notes")[1:] == [["work", "main", ""]]


def test_work_waits_for_a_cell_that_awaits(kernel: LiveKernel, comms: dict[str, str], maker: str) -> None:
    before = kernel.text(maker).count("done when idle")
    cell = kernel.send(
        "import asyncio\nrunning = 'awaiting'\nstage.when_idle(lambda: notes.append(('work', on(), running)))\n"
        "for _ in range(5):\n    await asyncio.sleep(0.01)\nrunning = ''"
    )
    kernel.until_over(cell)
    assert kernel.value("notes") == [["work", "main", ""]]
    assert kernel.text(maker).count("done when idle") == before


def test_two_messages_on_the_main_thread_tell_the_other_world(kernel: LiveKernel, comms: dict[str, str]) -> None:
    worlds = []
    kernel.run("hearing = Hearing(get_ipython().kernel)")
    for value in (True, False):
        kernel.click(comms["let"], {"value": value})
        worlds.append(kernel.value("hearing.world.name"))
    at_first = (
        "UNKNOWN"
        if kernel.value("bool(getattr(get_ipython().kernel, '_supports_kernel_subshells', False))")
        else "AFTER_CELL"
    )
    assert worlds == [at_first, "AFTER_CELL"]


STEPS = """
made, ends = [], []

def steps():
    made.append("begin")
    try:
        while True:
            print("step", len(made))
            made.append("step")
            yield
            time.sleep(0.01)
    finally:
        print("put back")
        made.append(running or "end")

played = stage.play(steps(), lambda error: ends.append(type(error).__name__))
"""


def test_steps_run_between_cells_and_end_before_one(kernel: LiveKernel, maker: str) -> None:
    kernel.run(STEPS)
    kernel.until_printed(maker, "step 5")
    cell = kernel.run("running = 'next cell'; print('over', played.over, ends, len(made) > 5, made[-1])")
    assert kernel.text(cell) == "over True ['NoneType'] True end\n"
    assert kernel.text(maker).endswith("put back\n")
    kernel.run("running = ''")


def test_a_click_on_the_main_shell_cancels_steps(kernel: LiveKernel, comms: dict[str, str], maker: str) -> None:
    kernel.run("boxes['plain'].observe(lambda change: played.cancel(), 'value')")
    kernel.run(STEPS.replace("put back", "put back again").replace('print("step"', 'print("another step"'))
    kernel.until_printed(maker, "another step")
    kernel.click(comms["plain"], {"value": True})
    kernel.until_printed(maker, "put back again")
    assert kernel.value("[played.over, ends, made[-1]]") == [True, ["NoneType"], "end"]


def test_the_interrupt_button_ends_steps_and_not_the_kernel(kernel: LiveKernel, maker: str) -> None:
    # a kernel between two turns ignores the button: the second step has begun when its text is there
    slow = STEPS.replace("put back", "interrupted").replace(
        "yield\n", "yield\n            print('sleeps', flush=True)\n"
    )
    kernel.run(slow.replace("time.sleep(0.01)", "time.sleep(30)"))
    kernel.until_printed(maker, "sleeps")
    kernel.interrupt()
    kernel.until_printed(maker, "interrupted")
    assert kernel.value("[played.over, ends]") == [True, ["NoneType"]]


def test_an_error_of_work_is_shown_where_the_panel_is(kernel: LiveKernel, maker: str) -> None:
    cell = kernel.run("stage.when_idle(lambda: 1 / 0)\nstage.when_idle(lambda: print('after it'))")
    kernel.until_printed(maker, "after it")
    assert kernel.errors(maker) == ["ZeroDivisionError"]
    assert not kernel.errors(cell)
    del kernel.messages[maker]


BACKGROUND = """
%%memfit --background --quiet
notes.clear()
print("begun")
for _ in range(3000):
    {step}
    time.sleep(0.005)
    if "let" in names():
        break
during = list(notes)
print("seen by", threading.current_thread().name)
"""


def test_a_background_cell_leaves_the_main_shell_to_clicks(kernel: LiveKernel, comms: dict[str, str]) -> None:
    kernel.run(f"%config MemLab.predict = False\n{MAKE}")
    cell = kernel.run(BACKGROUND.format(step=STEP.strip().replace("\n", "\n    ")))
    kernel.until_printed(cell, "begun")
    kernel.click(comms["let"], {"value": True})
    kernel.until_printed(cell, "seen by memlab-background")
    waiting = kernel.run("%memfit wait")
    assert kernel.value("during") == [["let", "main", ""]]
    (receipt,) = kernel.shown(cell)
    assert set(receipt) == {"text/plain", "text/html"}
    assert not kernel.shown(waiting)
    assert kernel.text(waiting).endswith("in the background has ended\n")


def test_a_failed_background_cell_shows_its_error_and_fails_who_waits(kernel: LiveKernel, maker: str) -> None:
    cell = kernel.send("%%memfit --background\ndef broken():\n    return {}['gone']\nbroken()")
    waiting = kernel.send("%memfit wait")
    kernel.until_over(waiting)
    assert kernel.errors(cell) == ["KeyError"]
    assert "in the background failed: KeyError: 'gone'" in kernel.text(waiting)


def test_ctrl_c_ends_the_waiting_only(kernel: LiveKernel, maker: str) -> None:
    kernel.run("go_on = threading.Event()")
    kernel.run("%%memfit --background\nuntil(go_on.is_set)\nprint('to its end')")
    waiting = kernel.send("print('waits')\n%memfit wait")
    kernel.until_printed(waiting, "waits")
    kernel.interrupt()
    kernel.until_over(waiting)
    assert kernel.errors(waiting) == ["KeyboardInterrupt"]
    assert kernel.text(kernel.run("go_on.set()\n%memfit wait")).endswith("in the background has ended\n")


@pytest.mark.full
def test_a_kernel_shuts_down_beside_a_background_cell() -> None:
    with live_kernel() as kernel:
        kernel.run("%load_ext memlab\nimport time")
        cell = kernel.run("%%memfit --background\nprint('begun')\nwhile True:\n    time.sleep(0.01)")
        kernel.until_printed(cell, "begun")
        kernel.shut_down()
