"""What a failed cell holds is let go: when, what, and what stays."""

from __future__ import annotations

import builtins
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memlab.jupyter import freeing
from memlab.jupyter.magic import load, unload
from tests.jupyter.conftest import Cell, Ran

FREED = "memfit: freed what the functions of the failed cell held"
OPT_OUT = "for %debug with variables: %config MemLab.free = False, and run it again"

PREPARE = """
import torch, weakref
held = []

def watched(tensor):
    held.append(weakref.ref(tensor))
    return tensor

def fail(error=torch.OutOfMemoryError):
    scores = watched(torch.zeros(1000))
    raise error("CUDA out of memory. Tried to allocate 2.00 GiB.")

def train(error=torch.OutOfMemoryError):
    hidden = watched(torch.zeros(1000))
    fail(error)

def alive():
    return sum(reference() is not None for reference in held)
"""

# a graph of eight layers, most of it held by autograd alone, on a device that has no room for the ninth
DEEP = """
from memlab.measuring.ledger import Ledger
ledger = Ledger("cpu", capacity_bytes=9 * 4 * 256 * 256)
weight = torch.ones(256, 256, requires_grad=True)
ledger.begin([])

def forward(rows):
    hidden = torch.ones(256, 256)
    for _ in range(rows):
        hidden = torch.tanh(hidden @ weight)
    return hidden

def deep():
    with ledger:
        return forward(20).sum()
"""


@pytest.fixture
def prepared(cell: Cell) -> Cell:
    """Cells with functions that hold tensors and fail."""
    assert cell(PREPARE).error is None
    return cell


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What the user types into the debugger, a line each."""

    def type_in(lines: str) -> None:
        waiting: Iterator[str] = iter(lines.splitlines())
        monkeypatch.setattr(builtins, "input", lambda prompt="": next(waiting))

    return type_in


def alive(cell: Cell) -> int:
    """How many tensors of the functions that failed are alive."""
    count = cell("alive()").result.result
    assert isinstance(count, int)
    return count


def notices(ran: Ran) -> list[str]:
    return [line for line in (ran.out + ran.err).splitlines() if line.startswith("memfit: freed")]


def test_functions_let_go_and_the_traceback_stays(shell: Any, prepared: Cell) -> None:
    prepared("%xmode Context")
    ran = prepared("before = watched(torch.zeros(10))\ntrain()")
    assert isinstance(ran.error, torch.OutOfMemoryError)
    assert ran.out.count("Traceback (most recent call last)") == 1
    assert "in train(" in ran.out
    assert "in fail(" in ran.out
    assert ran.out.rstrip().splitlines()[-1] == f"{FREED}; {OPT_OUT}"
    # the variable of the notebook is the user's
    assert alive(prepared) == 1
    assert shell.user_ns["before"].shape == (10,)


def test_every_byte_comes_back_that_a_graph_held(shell: Any, prepared: Cell) -> None:
    prepared(DEEP)
    assert isinstance(prepared("deep()").error, torch.OutOfMemoryError)
    assert shell.user_ns["ledger"].live_bytes == 0


def test_without_freeing_the_graph_stays(shell: Any, prepared: Cell) -> None:
    prepared(f"%config MemLab.free = False\n{DEEP}")
    prepared("deep()")
    gc.collect()
    assert shell.user_ns["ledger"].live_bytes > 6 * 4 * 256 * 256


def test_ten_failures_hold_no_more_than_one(shell: Any, prepared: Cell) -> None:
    prepared(DEEP)
    tensors = []
    for _ in range(10):
        prepared("deep()")
        assert shell.user_ns["ledger"].live_bytes == 0
        tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert len(set(tensors)) == 1
    assert alive(prepared) == 0


class _Lazy(dict[str, Any]):
    def values(self) -> Any:
        raise ValueError("imports a library")


def test_only_what_is_there_is_read() -> None:
    graph = torch.ones(2, requires_grad=True) * 2
    variables = {"lazy": _Lazy(), "output": _Lazy(logits=graph), "loss": graph, "plain": {"a": 1}}
    assert freeing.holders_of_graphs(variables) == ["output", "loss"]


def test_what_refers_to_itself_goes_too(prepared: Cell) -> None:
    prepared("""
def knot():
    loop = [watched(torch.zeros(10))]
    loop.append(loop)
    train()
knot()
""")
    assert alive(prepared) == 0


@pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt", "SystemExit"])
def test_other_errors_keep_everything(prepared: Cell, error: str) -> None:
    ran = prepared(f"train({error})")
    assert not notices(ran)
    assert alive(prepared) == 2


@pytest.mark.parametrize("error", ["MemoryError", "lambda text: RuntimeError('CUDA error: out of memory')"])
def test_every_error_that_says_so_counts(prepared: Cell, error: str) -> None:
    assert notices(prepared(f"train({error})"))
    assert alive(prepared) == 0


@pytest.mark.parametrize(
    "raising",
    ["raise ValueError('batch 7') from error", "raise ValueError('batch 7') from None", "{}['gone']"],
    ids=["from it", "from None", "while it is handled"],
)
def test_errors_that_an_out_of_memory_led_to_let_go_as_well(prepared: Cell, raising: str) -> None:
    ran = prepared(f"""
def guarded():
    batch = watched(torch.zeros(10))
    try:
        train()
    except torch.OutOfMemoryError as error:
        {raising}
guarded()
""")
    assert isinstance(ran.error, (ValueError, KeyError))
    assert len(notices(ran)) == 1
    assert alive(prepared) == 0


def test_a_group_lets_go_of_its_members(prepared: Cell) -> None:
    prepared("""
def task():
    try:
        train()
    except torch.OutOfMemoryError as error:
        return error
raise ExceptionGroup("tasks", [task()])
""")
    assert alive(prepared) == 0


@pytest.mark.parametrize("handler", ["saved = error", "saved = error; get_ipython().showtraceback()"])
def test_an_error_that_was_caught_is_left_alone(prepared: Cell, handler: str) -> None:
    ran = prepared(f"try:\n    train()\nexcept torch.OutOfMemoryError as error:\n    {handler}")
    assert ran.error is None
    assert not notices(ran)
    assert alive(prepared) == 2
    # nor does the end of another cell that fails touch it
    prepared("train()")
    assert alive(prepared) == 2


def test_an_interrupted_memfit_cell_lets_go(prepared: Cell) -> None:
    prepared("%xmode Context")
    ran = prepared("%%memfit\ntrain(KeyboardInterrupt)")
    assert isinstance(ran.error, KeyboardInterrupt)
    assert notices(ran) == [f"memfit: freed what the functions of the interrupted cell held; {OPT_OUT}"]
    assert "in train(" in ran.out + ran.err
    assert alive(prepared) == 0


def test_a_memfit_cell_that_runs_out_of_memory_says_it_once(prepared: Cell) -> None:
    ran = prepared("%%memfit\ntrain()")
    assert isinstance(ran.error, torch.OutOfMemoryError)
    assert len(notices(ran)) == 1
    assert (ran.out + ran.err).count("Traceback (most recent call last)") == 1
    assert alive(prepared) == 0


def test_another_error_of_a_memfit_cell_keeps_everything(prepared: Cell) -> None:
    assert not notices(prepared("%%memfit\ntrain(ValueError)"))
    assert alive(prepared) == 2


@pytest.mark.parametrize("magic", ["%%time", "%%capture", "%%time\n%%memfit", "%%capture\n%%memfit"])
def test_cells_run_by_other_magics_let_go(prepared: Cell, magic: str) -> None:
    assert len(notices(prepared(f"{magic}\ntrain()"))) == 1
    assert alive(prepared) == 0


def test_a_script_lets_go(prepared: Cell, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("size = 3\ntrain()\n")
    ran = prepared(f"%run -i {script}")
    assert len(notices(ran)) == 1
    assert prepared("size").result.result == 3
    assert alive(prepared) == 0


def test_functions_that_still_run_keep_their_variables(shell: Any, prepared: Cell) -> None:
    ran = prepared("""
def outer():
    kept = torch.ones(3)
    get_ipython().run_cell("train()")
    return float(kept.sum())
total = outer()
""")
    assert shell.user_ns["total"] == 3.0
    assert len(notices(ran)) == 1
    assert alive(prepared) == 0


def test_a_generator_that_can_go_on_goes_on(prepared: Cell) -> None:
    ran = prepared("""
def batches():
    batch = torch.ones(3)
    try:
        train()
    except torch.OutOfMemoryError as error:
        yield error
    yield float(batch.sum())

waiting = batches()

def again():
    batch = watched(torch.zeros(10))
    raise next(waiting)
again()
""")
    assert isinstance(ran.error, torch.OutOfMemoryError)
    assert alive(prepared) == 0
    assert prepared("next(waiting)").result.result == 3.0


def test_results_stay(shell: Any, prepared: Cell) -> None:
    prepared("torch.ones(3)")
    number = shell.execution_count - 1
    prepared("train()")
    assert torch.equal(shell.user_ns["_"], torch.ones(3))
    assert torch.equal(shell.user_ns["Out"][number], torch.ones(3))


def test_variables_that_may_hold_a_graph_are_named(prepared: Cell) -> None:
    ran = prepared("""
loss = torch.ones(2, requires_grad=True).sum()
output = {"logits": loss * 2}
count, plain, _private = 3, torch.ones(2), loss
train()
""")
    assert notices(ran) == [f"{FREED}; variables may hold more: del loss, output; {OPT_OUT}"]


def test_the_debugger_shows_the_stack_without_variables(prepared: Cell, typed: Callable[[str], None]) -> None:
    prepared("size = 3\ntrain()")
    typed("where\np scores\nup\np hidden\nup\np size\nquit")
    ran = prepared("%debug")
    assert ran.error is None, ran.err
    assert "skipping 1 hidden frame" in ran.out
    assert "----> 2 train()" in ran.out
    assert "     fail(error)" in ran.out
    assert "NameError: name 'scores' is not defined" in ran.out
    assert "NameError: name 'hidden' is not defined" in ran.out
    assert ran.out.rstrip().endswith("3")
    assert alive(prepared) == 0


def test_the_traceback_can_be_shown_again(prepared: Cell) -> None:
    prepared("train()")
    ran = prepared("%tb")
    assert "raise error(" in ran.out
    assert "OutOfMemoryError: CUDA out of memory" in ran.out
    assert not notices(ran)


def test_who_wants_to_debug_keeps_the_variables(prepared: Cell, typed: Callable[[str], None]) -> None:
    prepared("%config MemLab.free = False")
    assert not notices(prepared("train()"))
    assert alive(prepared) == 2
    typed("p scores.shape\nup\np hidden.shape\nquit")
    assert prepared("%debug").out.count("torch.Size([1000])") == 2


def test_whoever_changes_their_mind_gets_the_memory_back(prepared: Cell) -> None:
    prepared("%config MemLab.free = False")
    prepared("train()")
    assert notices(prepared("%config MemLab.free = True"))
    assert alive(prepared) == 0


def test_an_error_is_freed_once(prepared: Cell) -> None:
    assert notices(prepared("train()"))
    assert not notices(prepared(""))
    assert not notices(prepared("1 + 1"))
    assert not notices(prepared("1 / 0"))


def test_what_ran_out_before_the_extension_came_is_freed_when_it_comes(shell: Any, prepared: Cell) -> None:
    prepared("%unload_ext memlab")
    assert not notices(prepared("train()"))
    assert alive(prepared) == 2
    assert notices(prepared("%load_ext memlab"))
    assert alive(prepared) == 0


def test_unloaded_it_leaves_the_shell_alone(shell: Any) -> None:
    def callbacks() -> list[Any]:
        return [callback for event in ("pre_run_cell", "post_run_cell") for callback in shell.events.callbacks[event]]

    with_memlab = callbacks()
    unload(shell)
    assert not [each for each in callbacks() if each.__module__.startswith("memlab")]
    load(shell)
    assert len(callbacks()) == len(with_memlab)


def test_a_gpu_is_asked_before_and_after(prepared: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def counters(_device: torch.device) -> dict[str, dict[str, dict[str, int]]]:
        return {"allocated_bytes": {"all": {"current": (2 if emptied else 8) * 2**29}}}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", counters)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    # what is counted here is what the counters say, in the order in which they are read
    freed = freeing.free([ValueError()])
    assert emptied == [True]
    assert "(CUDA: 8.00 GiB → 2.00 GiB allocated)" in freeing.sentence(freed, "failed", [])


def test_without_a_gpu_no_number_is_made_up() -> None:
    assert not torch.cuda.is_initialized()
    assert freeing.free([ValueError()]) == ""
