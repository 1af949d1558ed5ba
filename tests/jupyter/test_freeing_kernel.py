"""Freeing in a real kernel: its event loop, its signals and its messages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.kernel import frames_of_memlab, run_in_kernel, text_of

pytest.importorskip("nbclient", reason="needs nbclient")
pytest.importorskip("ipykernel", reason="needs ipykernel")

FAIL = """
def attend(hidden, error):
    scores = watched(torch.ones(13_107_200))  # 50 MiB
    if error is KeyboardInterrupt:
        signal.raise_signal(signal.SIGINT)
    raise error("CUDA out of memory. Tried to allocate 20.00 GiB.")

def train(error=torch.OutOfMemoryError):
    hidden = watched(torch.ones(1000))
    attend(hidden, error)
"""

CELLS = {
    "load": "%load_ext memlab\nimport asyncio, signal, torch, weakref",
    "make": "held = []\n\ndef watched(tensor):\n    held.append(weakref.ref(tensor))\n    return tensor\n" + FAIL,
    "plain": "train()",
    "after_plain": "[reference() is None for reference in held]",
    "stack": "%tb",
    "memfit": "%%memfit\ntrain()",
    "after_memfit": "[reference() is None for reference in held[2:]]",
    "interrupted": "%%memfit\ntrain(KeyboardInterrupt)",
    "after_interrupted": "[reference() is None for reference in held[4:]]",
    "await": "%%memfit\nasync def wait():\n    hidden = watched(torch.ones(1000))\n"
    "    signal.raise_signal(signal.SIGINT)\n    await asyncio.sleep(60)\nawait wait()",
    "after_await": "[reference() is None for reference in held[6:]]",
    "top_level_await": "await asyncio.sleep(0)\ntrain()",
    "after_top_level_await": "[reference() is None for reference in held[7:]]",
    "other": "train(ValueError)",
    "after_other": "[reference() is None for reference in held[9:]]",
    "keep": "%config MemLab.free = False",
    "kept": "train()",
    "after_kept": "[reference() is None for reference in held[11:]]",
}


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    """Every cell, run in one kernel, by name."""
    return run_in_kernel(CELLS)


def kinds(cell: Any) -> list[str]:
    return [output.output_type for output in cell.outputs]


def value(cell: Any) -> str:
    (result,) = (output for output in cell.outputs if output.output_type == "execute_result")
    return str(result.data["text/plain"])


@pytest.mark.parametrize("name", ["plain", "memfit", "interrupted", "top_level_await"])
def test_what_the_functions_held_is_gone_in_the_next_cell(ran: dict[str, Any], name: str) -> None:
    assert value(ran[f"after_{name}"]) == "[True, True]"


@pytest.mark.parametrize("name", ["plain", "memfit", "interrupted", "top_level_await"])
def test_the_traceback_is_shown_whole_and_the_notice_below_it(ran: dict[str, Any], name: str) -> None:
    outputs = ran[name].outputs
    error, *between, notice = outputs[kinds(ran[name]).index("error") :]
    # others may write to stderr between the two; memlab may not
    assert all(each.get("name") == "stderr" and not frames_of_memlab(each.text) for each in between), outputs
    assert notice.output_type == "stream", outputs
    assert [line for line in error.traceback if "train" in line]
    assert [line for line in error.traceback if "attend" in line]
    assert notice.text.count("memfit: freed what the functions of the") == 1
    assert notice.text.endswith("%config MemLab.free = False, and run it again\n")


def test_an_interrupted_wait_lets_go_too(ran: dict[str, Any]) -> None:
    assert "error" in kinds(ran["await"])
    assert "of the interrupted cell" in text_of(ran["await"])
    assert value(ran["after_await"]) == "[True]"


def test_the_traceback_can_be_shown_again(ran: dict[str, Any]) -> None:
    (error,) = (output for output in ran["stack"].outputs if output.output_type == "error")
    assert "attend" in "".join(error.traceback)


@pytest.mark.parametrize("name", ["other", "kept"])
def test_other_errors_and_who_wants_to_debug_keep_everything(ran: dict[str, Any], name: str) -> None:
    assert value(ran[f"after_{name}"]) == "[False, False]"
    assert "memfit: freed" not in text_of(ran[name])
