"""`%%memfit --background`: a real training cell on a thread of its own, beside other cells."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from memlab.errors import SessionError
from memlab.jupyter.magic import loaded
from memlab.session import session_of, sessions
from tests.helpers.kernel import frames_of_memlab
from tests.jupyter.conftest import MAKE, STEP, TRAIN, Cell, Ran

_BODY = STEP.strip().replace("\n", "\n    ")
# a step whenever the test says so, which is told when it has ended
STEPPING = f"""
%%memfit --background --quiet
for _ in range(1000):
    go.acquire()
    {_BODY}
    stepped.release()
    if stop.is_set():
        break
"""
_PATIENCE_SECONDS = 30.0


Both = Callable[..., Ran]


@pytest.fixture
def both(shell: Any, capsys: pytest.CaptureFixture[str]) -> Both:
    """Run cells one after another; returns how the last one ended, and what was printed by all and meanwhile."""

    def run(*sources: str) -> Ran:
        capsys.readouterr()
        results = [shell.run_cell(source.strip("\n"), store_history=True) for source in sources]
        captured = capsys.readouterr()
        return Ran(results[-1], captured.out, captured.err)

    return run


class Stepping:
    """A training cell in the background whose steps the test lets happen one by one."""

    def __init__(self, cell: Cell, shell: Any, both: Both) -> None:
        self._cell = cell
        self._both = both
        self.go, self.stepped, self.stop = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
        shell.user_ns |= {"go": self.go, "stepped": self.stepped, "stop": self.stop}

    def begin(self, flags: str = "") -> None:
        assert self._cell(STEPPING.replace("--quiet", f"--quiet {flags}")).error is None
        self.step()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.go.release()
            assert self.stepped.acquire(timeout=_PATIENCE_SECONDS)

    def end(self) -> str:
        """Let it end after one more step; returns what was printed meanwhile."""
        return self._both("stop.set()\ngo.release()", "%memfit wait").out


@pytest.fixture
def stepping(made: Cell, shell: Any, both: Both) -> Iterator[Stepping]:
    training = Stepping(made, shell, both)
    yield training
    training.stop.set()
    training.go.release(1000)
    if shell in loaded:
        loaded[shell].notebook.background.close()


def session() -> Any:
    return sessions()[0]


class TestRunning:
    def test_the_cell_is_over_at_once_and_goes_on(self, stepping: Stepping, made: Cell) -> None:
        stepping.begin()
        assert made("40 + 2").result.result == 42
        out = stepping.end()
        assert "memfit · Sequential 1.73k · AdamW · cpu · batch 12 × 16 · CPU ledger · 2 steps" in out
        assert out.endswith("in the background has ended\n")

    def test_it_says_so(self, made: Cell, both: Both) -> None:
        said = "memfit: runs in the background; %memfit wait waits for it, %memfit cancel ends it\n"
        assert both("%%memfit --background\n1", "%memfit wait").out.startswith(said)
        assert "runs in the background" not in both("%%memfit --background --quiet\n1", "%memfit wait").out

    def test_text_is_ipythons(self, made: Cell, shell: Any, both: Both) -> None:
        out = both(
            "%%memfit --background --quiet\nimport asyncio, threading\nfiles = !echo listed\n"
            "await asyncio.sleep(0.001)\nwhere = threading.current_thread().name\nhere = %pwd\n{'last': 1}",
            "%memfit wait",
        ).out
        assert shell.user_ns["files"] == ["listed"]
        assert shell.user_ns["where"] == "memlab-background"
        assert "{'last': 1}" in out

    @pytest.mark.parametrize(
        ("text", "shown"),
        [("6 * 7;", False), ("6 * 7", True), ("x = 42", False), ("6 * 7  # ;", True), ("None", False)],
    )
    def test_the_last_value_is_shown_as_always(self, made: Cell, text: str, shown: bool, both: Both) -> None:
        assert ("42" in both(f"%%memfit --background --quiet\n{text}", "%memfit wait").out) is shown

    def test_out_and_history_are_those_of_the_main_shell(self, made: Cell, shell: Any) -> None:
        made("'mine'")
        made("%%memfit --background --quiet\n'theirs'")
        made("%memfit wait")
        assert shell.user_ns["_"] == "mine"

    def test_training_comes_out_as_in_the_foreground(self, made: Cell, shell: Any, both: Both) -> None:
        assert made(f"%%memfit --accumulate 2\n{TRAIN}").error is None
        foreground = {name: value.clone() for name, value in shell.user_ns["model"].state_dict().items()}
        made("%memfit undo")
        made(MAKE)
        assert "4 steps" in both(f"%%memfit --background --accumulate 2\n{TRAIN}", "%memfit wait").out
        for name, value in shell.user_ns["model"].state_dict().items():
            assert torch.equal(value, foreground[name]), name

    def test_a_model_made_in_the_cell_is_found(self, both: Both) -> None:
        ran = both(f"%%memfit --background --quiet --accumulate 2\n{MAKE}{TRAIN}", "%memfit wait")
        assert "--accumulate 2" in ran.out
        assert session().plan.label == "--accumulate 2"

    def test_running_out_of_memory_is_rescued(self, made: Cell, both: Both) -> None:
        made("inputs, target = torch.randn(4000, 16), torch.randint(0, 4, (4000,))")
        out = both(f"%%memfit --background --quiet --capacity 1MiB\n{TRAIN}", "%memfit wait").out
        assert "same batch again" in out, out
        assert session().plan.accumulation > 1

    def test_grad_mode_is_the_main_threads(self, made: Cell, shell: Any) -> None:
        with torch.no_grad():
            made("%%memfit --background --quiet\nhas_grad = torch.is_grad_enabled()")
            made("%memfit wait")
        assert shell.user_ns["has_grad"] is False

    def test_the_default_device_is_the_main_threads(self, made: Cell, shell: Any) -> None:
        with torch.device("meta"):
            made("%%memfit --background --quiet\nwhere = torch.ones(1).device.type")
            made("%memfit wait")
        assert shell.user_ns["where"] == "meta"

    def test_autocast_is_the_main_threads(self, made: Cell, shell: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            made("%%memfit --background --quiet\nautocast = torch.is_autocast_enabled('cpu')")
            made("%memfit wait")
        assert shell.user_ns["autocast"] is True


class TestSwitching:
    def test_a_switch_from_the_main_thread_is_applied_at_the_next_step(self, stepping: Stepping, shell: Any) -> None:
        stepping.begin()
        session().switch("--accumulate 3")
        assert (session().plan.label, session().pending.label) == ("as written", "--accumulate 3")
        stepping.step()
        assert (session().plan.label, session().pending) == ("--accumulate 3", None)
        out = stepping.end()
        assert "step 2: as written → --accumulate 3" in out

    def test_a_toggle_of_a_panel_is_applied_at_the_next_step(self, stepping: Stepping, shell: Any) -> None:
        stepping.begin()
        control = loaded[shell].notebook.control_of(shell.user_ns["model"])
        control.ask("accumulation", "2")
        assert control.moment().toggles[0].text == "pending"
        stepping.step()
        assert control.moment().toggles[0].text == "applied at step 2"

    def test_the_line_magic_waits_for_the_step_too(self, stepping: Stepping, made: Cell) -> None:
        stepping.begin()
        assert (
            made("%memfit --accumulate 2").out == "memfit: as written → --accumulate 2 on Sequential at the next step\n"
        )
        stepping.step()
        assert session().plan.label == "--accumulate 2"

    def test_a_session_from_before_is_taken_over_and_given_back(self, stepping: Stepping, made: Cell) -> None:
        made(f"%%memfit --accumulate 2\n{TRAIN}")
        stepping.begin("--accumulate 3")
        assert session().plan.label == "--accumulate 3"
        stepping.end()
        assert made("%memfit --accumulate 4").error is None
        assert session().plan.label == "--accumulate 4"
        assert made(f"%%memfit\n{TRAIN}").error is None


class TestRefusals:
    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("%%memfit --background\n1", "%%memfit --background: In ["),
            ("%%memfit\nmodel(inputs)", "trains Sequential in the background"),
            ("%%memfit --accumulate 2 --model model\n1", "trains Sequential in the background"),
            ("%memfit undo", "%memfit undo: In ["),
            ('%memfit compare "--accumulate 2"', "%memfit compare: In ["),
            ("%memfit find --budget 1GiB", "%memfit find: In ["),
        ],
    )
    def test_what_would_meet_it_in_the_middle_of_a_step(
        self, stepping: Stepping, made: Cell, line: str, said: str
    ) -> None:
        stepping.begin()
        ran = made(line)
        assert said in ran.err
        assert ran.err.strip().endswith("%memfit wait waits for it, %memfit cancel ends it")
        assert "Traceback" not in ran.out
        assert session().plan.label == "as written"

    def test_another_model_may_train_meanwhile(self, stepping: Stepping, made: Cell) -> None:
        stepping.begin()
        made("other = torch.nn.Linear(16, 4)\nothers = torch.optim.SGD(other.parameters(), 0.1)")
        step = TRAIN.replace("model(", "other(").replace("optimizer", "others")
        ran = made(f"%%memfit --model other\n{step}")
        assert "Linear 68 · SGD · cpu · batch 12 × 16 · CPU ledger · 4 steps" in ran.out, ran.err
        stepping.end()

    def test_a_cell_whose_model_is_not_known_is_refused(self, stepping: Stepping, made: Cell) -> None:
        stepping.begin()
        made("del model")
        ran = made("%%memfit\nx = 1")
        assert "maybe with the same model" in ran.err

    def test_it_cannot_wait_for_itself_or_start_another(self, made: Cell) -> None:
        made("%%memfit --background --quiet\n%memfit wait")
        assert "cannot wait for its own end" in made("%memfit wait").err
        made("%%memfit --background --quiet\nget_ipython().run_cell_magic('memfit', '--background', '1')")
        assert "%%memfit within a %%memfit cell" in made("%memfit wait").err


class TestErrors:
    def test_the_traceback_is_that_of_the_cell(self, made: Cell, both: Both) -> None:
        ran = both("%%memfit --background --quiet\ndef broken():\n    return {}['gone']\nbroken()", "%memfit wait")
        assert "KeyError: 'gone'" in ran.out
        assert "line 4" in ran.out
        assert not frames_of_memlab(ran.out)
        assert "in the background failed: KeyError: 'gone'" in ran.err
        assert made("%memfit wait").out == "memfit: no cell runs in the background\n"

    def test_it_can_be_debugged(self, made: Cell) -> None:
        made("%%memfit --background --quiet\n{}['gone']")
        made("try:\n    %memfit wait\nexcept Exception:\n    pass")
        assert isinstance(sys.last_value, KeyError)

    def test_a_refused_plan_is_one_line(self, cell: Cell, both: Both) -> None:
        cell(MAKE.replace("torch.nn.ReLU()", "torch.nn.BatchNorm1d(32)"))
        ran = both(f"%%memfit --background --quiet --accumulate 2\n{TRAIN}", "%memfit wait")
        assert "UsageError: accumulation: " in ran.err
        assert "Traceback" not in ran.out

    def test_a_syntax_error_is_shown_at_once(self, made: Cell) -> None:
        ran = made("%%memfit --background\nx = = 1")
        assert isinstance(ran.error, SyntaxError)

    def test_running_out_of_memory_leaves_nothing_behind(self, shell: Any, both: Both, made: Cell) -> None:
        kept: list[weakref.ref[torch.Tensor]] = []
        shell.user_ns["keep"] = lambda tensor: kept.append(weakref.ref(tensor))
        ran = both(
            "%%memfit --background --quiet\ndef fail():\n    big = torch.ones(1000)\n    keep(big)\n"
            "    raise torch.OutOfMemoryError('CUDA out of memory')\nfail()",
            "%memfit wait",
        )
        assert "Try next: %%memfit --accumulate 2" in ran.out
        assert "freed what the functions of the failed cell held" in ran.out
        assert kept[0]() is None

    def test_afterwards_everything_works_as_before(self, made: Cell, shell: Any) -> None:
        made("%%memfit --background --quiet\n1 / 0")
        made("%memfit wait")
        assert made(f"%%memfit\n{TRAIN}").error is None
        assert session_of(shell.user_ns["model"]) is session()


class TestEnding:
    def test_cancelled_it_ends_before_its_next_step(self, stepping: Stepping, made: Cell, both: Both) -> None:
        stepping.begin()
        stepping.step()
        assert made("%memfit cancel").out.endswith("in the background ends before its next step\n")
        out = both("go.release()", "%memfit wait").out
        assert session().steps == 2
        assert "CPU ledger · 2 steps" in out
        assert "memfit: cancelled by %memfit cancel\n" in out
        assert out.endswith("in the background was cancelled\n")
        session().switch("--accumulate 2")
        assert session().plan.label == "--accumulate 2"

    def test_paused_by_a_panel_it_is_cancelled_too(self, stepping: Stepping, shell: Any, made: Cell) -> None:
        stepping.begin()
        control = loaded[shell].notebook.control_of(shell.user_ns["model"])
        control.pause()
        stepping.go.release()
        assert made("%memfit cancel").error is None
        assert made("%memfit wait").out.endswith("in the background was cancelled\n")
        assert session().steps == 1

    def test_a_panel_cancels_it(self, stepping: Stepping, shell: Any, both: Both) -> None:
        stepping.begin()
        loaded[shell].notebook.control_of(shell.user_ns["model"]).cancel()
        out = both("go.release()", "%memfit wait").out
        assert "memfit: cancelled from the panel after step 1\n" in out
        assert out.endswith("in the background was cancelled\n")

    def test_a_cell_that_awaits_is_cancelled_too(self, made: Cell) -> None:
        body = f"import asyncio\nfor _ in range(10_000):\n    await asyncio.sleep(0.001)\n    {_BODY}"
        made(f"%%memfit --background --quiet\n{body}")
        made("%memfit cancel")
        assert made("%memfit wait").out.endswith("in the background was cancelled\n")

    def test_nothing_to_cancel_or_to_wait_for(self, made: Cell) -> None:
        assert made("%memfit cancel").out == "memfit: no cell runs in the background\n"
        assert made("%memfit wait").out == "memfit: no cell runs in the background\n"

    def test_unloading_cancels_it(self, stepping: Stepping, made: Cell) -> None:
        stepping.begin()
        stepping.go.release(1000)
        assert made("%unload_ext memlab").error is None
        assert not sessions()
        assert "memlab-background" not in [thread.name for thread in threading.enumerate()]

    def test_what_does_not_train_cannot_be_cancelled_and_that_is_said(self, made: Cell, shell: Any) -> None:
        shell.user_ns["go_on"] = go_on = threading.Event()
        made("%%memfit --background --quiet\ngo_on.wait()")
        background = loaded[shell].notebook.background
        with pytest.raises(SessionError, match="has come to no training step within 0 s"):
            background.close(patience_seconds=0.01)
        assert background.running
        go_on.set()
        made("%memfit wait")

    def test_its_thread_keeps_no_process_alive(self, stepping: Stepping) -> None:
        stepping.begin()
        (thread,) = (each for each in threading.enumerate() if each.name == "memlab-background")
        assert thread.daemon
