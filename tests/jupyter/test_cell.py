"""`%%memfit` runs a cell as IPython would, and measures it."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memlab.jupyter.state import own_frames
from memlab.records.run_record import RunRecord
from memlab.session import session_of, sessions
from tests.helpers.kernel import frames_of_memlab
from tests.jupyter.conftest import MAKE, STEP, TRAIN, Cell


def _table(out: str) -> list[str]:
    lines = out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("memfit · "))
    return lines[start:]


def test_a_bare_cell_changes_nothing_and_shows_a_receipt(shell: Any, made: Cell) -> None:
    ran = made(f"%%memfit\n{TRAIN}")
    title, head, _, row = _table(ran.out)[:4]
    assert ran.error is None
    assert title == "memfit · Sequential 1.73k · AdamW · cpu · batch 12 × 16 · CPU ledger · 4 steps"
    assert head.split()[:3] == ["plan", "peak", "allocated"]
    assert row.startswith("as written")
    assert session_of(shell.user_ns["model"]).plan.label == "as written"


def test_the_loop_trains_as_without_the_magic(shell: Any, made: Cell) -> None:
    made(f"%%memfit\n{TRAIN}")
    with_magic = {name: p.detach().clone() for name, p in shell.user_ns["model"].named_parameters()}
    made("%memfit undo")
    made(MAKE)
    made(TRAIN)
    for name, parameter in shell.user_ns["model"].named_parameters():
        assert torch.equal(parameter, with_magic[name])


def test_most_steps_of_a_millisecond_run_without_memlab_and_all_are_counted(
    shell: Any, made: Cell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("memlab.measuring.steps._SHORT_SECONDS", 3600.0)  # this machine may be busy
    monkeypatch.setattr("memlab.session.session._MOST_REST_SECONDS", 3600.0)
    many = TRAIN.replace("range(4)", "range(80)") + "    calls.append(vars(model).get('_compiled_call_impl'))\n"
    made(many.replace("    calls", "    pass; calls", 1) if "calls = []" in many else f"calls = []\n{many}")
    plain = [p.detach().clone() for p in shell.user_ns["model"].parameters()]
    made("%memfit undo")
    made(MAKE)
    ran = made(f"%%memfit\ncalls = []\n{many}")
    assert _table(ran.out)[0].endswith(" · 80 steps")
    own = [call is None for call in shell.user_ns["calls"]]
    assert own == [False] * 19 + [True] * 30 + [False] * 5 + [True] * 26
    assert all(torch.equal(a, b) for a, b in zip(plain, shell.user_ns["model"].parameters(), strict=True))
    again = made(f"%%memfit\n{TRAIN}")
    assert _table(again.out)[0].endswith(" · 4 steps")
    made(f"%memfit record {tmp_path / 'run.json'}")
    assert [step.step for step in RunRecord.load(tmp_path / "run.json").steps][-5:] == [55, 81, 82, 83, 84]


@pytest.mark.parametrize("flags", ["", "--accumulate 2", "--capacity 1GiB"])
def test_calls_with_computed_weights_bring_no_warnings_of_torch(made: Cell, flags: str) -> None:
    ran = made(f"""%%memfit {flags}
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("error")
    for _ in range(4):
        weights = {{name: 2 * parameter for name, parameter in model.named_parameters()}}
        torch.func.functional_call(model, weights, (inputs,)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""")
    assert ran.error is None
    assert ".grad" not in ran.out + ran.err
    assert "4 steps" in ran.out


def test_flags_set_the_plan_which_stays_and_rows_add_up_across_cells(shell: Any, made: Cell) -> None:
    made(f"%%memfit\n{TRAIN}")
    made(f"%%memfit --accumulate 4\n{TRAIN}")
    ran = made(f"%%memfit --accumulate 4 --adam8bit\n{TRAIN}")
    plans = [line.split("  ")[0] for line in _table(ran.out)[3:] if line.startswith(("as written", "--"))]
    assert plans == ["as written", "--accumulate 4", "--accumulate 4 --adam8bit ◂ this cell"]
    assert session_of(shell.user_ns["model"]).plan.accumulation == 4


def test_a_bare_cell_keeps_the_plan_in_force(shell: Any, made: Cell) -> None:
    made(f"%%memfit --accumulate 4\n{TRAIN}")
    ran = made(f"%%memfit\n{TRAIN}")
    assert "--accumulate 4" in ran.out
    assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 4"
    made(f"%%memfit --accumulate 1\n{TRAIN}")
    assert session_of(shell.user_ns["model"]).plan.label == "as written"


def test_a_name_in_braces_is_a_variable_in_both_magics(shell: Any, made: Cell) -> None:
    shell.user_ns["PARTS"] = 3
    ran = made("%%memfit --accumulate {PARTS} --capacity {PARTS}MiB\n" + TRAIN)
    assert "CPU ledger (capacity 3.0 MiB)" in ran.out
    assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 3"
    made("%memfit --accumulate {2 * PARTS}")
    assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 6"
    # the cell itself is run as it is written
    assert made("%%memfit\nprint('{PARTS}', f'{PARTS}')\n" + TRAIN).out.startswith("{PARTS} 3")


def test_a_name_that_is_no_variable_stays_and_is_named(made: Cell) -> None:
    missing = "{LIMIT}: there is no such variable, or what stands in the braces fails; give a value"
    assert missing in made("%%memfit --capacity {LIMIT}\n" + TRAIN).err


def test_a_model_made_in_the_cell_is_found_when_it_first_trains(shell: Any, cell: Cell) -> None:
    ran = cell(f"%%memfit --accumulate 4\n{MAKE}\n{TRAIN}")
    assert ran.error is None, ran.err
    assert "Sequential 1.73k · AdamW" in ran.out
    assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 4"
    assert session_of(shell.user_ns["model"]).steps == 4


def test_a_model_and_its_optimizer_inside_a_function_are_found(cell: Cell) -> None:
    body = "".join(f"    {line}\n" for line in (MAKE + STEP).strip().splitlines())
    ran = cell(f"%%memfit\ndef train():\n{body}    return float(loss)\nlast = train()")
    assert "Sequential 1.73k · AdamW · cpu · batch 12 × 16 · CPU ledger · 1 step" in ran.out


def test_shell_escapes_magics_and_the_last_value_work(shell: Any, made: Cell) -> None:
    ran = made("%%memfit\n!echo from a shell\nhere = %pwd\nx = 20\nx + 1")
    number = shell.execution_count - 1
    assert "from a shell" in ran.out
    assert f"Out[{number}]: 21" in ran.out
    assert shell.user_ns["Out"][number] == 21
    assert shell.user_ns["_"] == 21
    assert isinstance(shell.user_ns["here"], str)
    assert ran.result.result == 21


def test_a_semicolon_silences_the_last_value(made: Cell) -> None:
    assert "Out[" not in made("%%memfit\n20 + 1;").out


def test_top_level_await_works(shell: Any, made: Cell) -> None:
    ran = made("%%memfit\nimport asyncio\nawait asyncio.sleep(0, 'done')")
    assert ran.result.result == "done", ran.err


def test_another_cell_magic_inside_works(made: Cell) -> None:
    ran = made(f"%%memfit\n%%time\n{TRAIN}")
    assert "Wall time" in ran.out
    assert "4 steps" in ran.out


def test_an_error_is_shown_once_with_the_lines_of_the_cell(shell: Any, made: Cell) -> None:
    made("%xmode Context")
    ran = made("%%memfit\n\nx = 1\ndef fail():\n    raise KeyError('gone')\nfail()")
    text = ran.out + ran.err
    assert isinstance(ran.error, KeyError)
    assert text.count("Traceback (most recent call last)") == 1
    assert f"Cell In[{shell.execution_count - 1}], line 6" in text
    assert "line 5, in fail()" in text
    assert "run_cell_magic" not in text
    assert not frames_of_memlab(text)
    assert "IPython" not in text


def test_an_error_that_the_cell_handles_itself_is_its_own_affair(made: Cell) -> None:
    ran = made(
        "%%memfit\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    get_ipython().showtraceback()\nprint('after')"
    )
    assert ran.error is None
    assert (ran.out + ran.err).count("ZeroDivisionError: division by zero") == 1


def test_a_caught_magic_leaves_the_next_error_alone(shell: Any, made: Cell) -> None:
    ran = made(
        "try:\n    get_ipython().run_cell_magic('memfit', '', '1 / 0')\nexcept ZeroDivisionError:\n    pass\n{}['other']"
    )
    assert isinstance(ran.error, KeyError)
    assert "KeyError: 'other'" in ran.out + ran.err
    assert "showtraceback" not in vars(shell)


@pytest.mark.parametrize("line", ["def broken(:", "return 1", "x = = 2"])
def test_a_syntax_error_is_shown_once_and_nothing_is_applied(shell: Any, made: Cell, line: str) -> None:
    ran = made(f"%%memfit --accumulate 4\nx = 1\n{line}")
    text = ran.out + ran.err
    assert isinstance(ran.error, SyntaxError)
    assert text.count("SyntaxError") == 1
    assert f"Cell In[{shell.execution_count - 1}], line 3" in text
    assert "Traceback" not in text
    assert sessions() == ()
    assert "x" not in shell.user_ns


def test_a_syntax_error_raised_by_running_code_is_shown_once(made: Cell) -> None:
    text = (ran := made("%%memfit\neval('1 +')")).out + ran.err
    assert text.count("SyntaxError: ") == 1
    assert not frames_of_memlab(text)


@pytest.mark.parametrize("line", ["", "--accumulate 2", "--bf16"])
def test_an_error_in_an_operator_ends_in_the_line_that_called_it(cell: Cell, line: str) -> None:
    cell(
        "%xmode Context\nimport torch\n"
        "class Net(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x) @ torch.ones(width, 1)\n"
        "model, width, x = Net(8, 8), 8, torch.randn(4, 8)\noptimizer = torch.optim.SGD(model.parameters())"
    )
    step = "optimizer.zero_grad()\nmodel(x).sum().backward()\noptimizer.step()"
    text = (ran := cell(f"%%memfit {line}\n{step}\nwidth = 7\n{step}")).out + ran.err
    assert "shapes cannot be multiplied" in str(ran.error)
    places = [each for each in text.splitlines() if re.match(r"(Cell In|File )", each)]
    assert places[-1].endswith("in Net.forward(self, x)"), places


@pytest.mark.parametrize("installed", ["before the cell", "in the cell"])
def test_who_shows_errors_in_the_shell_stays(shell: Any, made: Cell, installed: str) -> None:
    """Packages that show tracebacks their own way put themselves in place of the shell's methods."""
    seen: list[str] = []

    def shows(_kind: type, error: BaseException, _lines: list[str]) -> None:
        seen.append(str(error))

    def shows_all(*_args: Any, **_kwargs: Any) -> None:
        shows(*sys.exc_info()[:2], [])

    def cache(*args: Any, **kwargs: Any) -> Any:
        return type(shell.compile).cache(shell.compile, *args, **kwargs)

    def install() -> None:
        shell._showtraceback, shell.showtraceback, shell.compile.cache = shows, shows_all, cache

    shell.user_ns["install"] = install
    try:
        if installed == "before the cell":
            install()
        made(f"%%memfit\n{'install()' if installed == 'in the cell' else ''}\n{TRAIN}\nraise ValueError('mine')")
        assert (shell._showtraceback, shell.showtraceback, shell.compile.cache) == (shows, shows_all, cache)
        assert seen == ["mine"]
        made("raise ValueError('later')")
        assert seen == ["mine", "later"]
    finally:
        for thing, name in ((shell, "_showtraceback"), (shell, "showtraceback"), (shell.compile, "cache")):
            vars(thing).pop(name, None)


def test_a_cell_within_a_cell_is_refused_in_a_line(shell: Any, made: Cell) -> None:
    said = (
        "UsageError: %%memfit within a %%memfit cell: a cell has one; put all flags on its line, as in %%memfit --accumulate 4 "
        "--checkpoint"
    )
    ran = made(f"%%memfit --checkpoint\n%%memfit\n{TRAIN}")
    assert (ran.out + ran.err).strip().splitlines()[-1] == said
    assert not frames_of_memlab(ran.out + ran.err)
    assert made(f"%%memfit\n{TRAIN}").error is None


def test_who_handles_errors_of_cells_has_each_once(made: Cell, shell: Any) -> None:
    handled: list[BaseException] = []
    own = shell.custom_exceptions, shell.CustomTB
    shell.set_custom_exc((ZeroDivisionError,), lambda _shell, _kind, error, _tb, tb_offset=None: handled.append(error))
    ran = made(f"%%memfit\n{TRAIN}\n1 / 0")
    shell.custom_exceptions, shell.CustomTB = own
    assert handled == [ran.error]
    assert isinstance(ran.error, ZeroDivisionError)


def test_exit_inside_a_cell_is_shown_once(made: Cell) -> None:
    ran = made("%%memfit\nraise SystemExit('enough')")
    assert isinstance(ran.error, SystemExit)
    assert (ran.out + ran.err).count("SystemExit: enough") == 1


def test_out_of_memory_names_the_first_thing_to_try(made: Cell) -> None:
    ran = made(f"%%memfit --capacity 20KiB --no-rescue\n{TRAIN}")
    text = ran.out + ran.err
    assert isinstance(ran.error, torch.OutOfMemoryError)
    assert "OutOfMemoryError: memlab CPU device out of memory. Tried to allocate" in text
    # it ran out in the update, which smaller batches do not make smaller
    begun = "The update had begun, and may be done for a part of the weights: load a checkpoint to go on."
    assert f"memfit: out of memory under as written. {begun} Try next: %%memfit --offload optimizer\n" in text
    assert text.count("Traceback (most recent call last)") == 1


def test_out_of_memory_advises_what_the_cell_may_change(made: Cell) -> None:
    """The settings that are configured to stay are for cells that name none, in the advice as in a rescue."""
    made("%config MemLab.keep = 'accumulation'\n%config MemLab.rescue = False")
    ran = made(f"%%memfit --capacity 12KiB --keep precision\n{TRAIN}")
    assert "Try next: %%memfit --accumulate 2\n" in ran.out + ran.err


def test_out_of_memory_shows_the_user_s_own_lines_and_advises_what_applies(cell: Cell) -> None:
    cell(
        "%xmode Context\n"
        "import torch\ndef step():\n    loss = model(inputs).square().sum()\n    loss.backward()\n    optimizer.step()\n"
        "norm = torch.nn.BatchNorm1d(64)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(16, 64), norm, torch.nn.Linear(64, 512), torch.nn.Linear(512, 1))\n"
        "optimizer = torch.optim.AdamW(model.parameters())\ninputs = torch.randn(64, 16)"
    )
    ran = cell("%%memfit --capacity 200KiB --no-rescue\nstep()")
    text = ran.out + ran.err
    assert isinstance(ran.error, torch.OutOfMemoryError)
    assert not frames_of_memlab(text)
    assert len([line for line in text.splitlines() if re.match(r"(Cell In|File )", line)]) == 2
    assert "site-packages" not in text
    (advice,) = re.findall(r"memfit: out of memory under as written\. Try next: (.*)", text)
    assert "--accumulate" not in advice  # which BatchNorm excludes
    # what it advises is not refused
    assert cell(f"{advice} --capacity 64MiB\nstep()").error is None


def test_frames_of_packages_are_known_wherever_they_are_installed(shell: Any) -> None:
    called: dict[str, Any] = {}
    exec(compile("def call(f): f()", "/home/someone/.local/lib/python3/site-packages/library.py", "exec"), called)
    exec(compile("def mine(): raise MemoryError('full')", "/home/someone/mine.py", "exec"), called)
    with pytest.raises(MemoryError) as caught:
        called["call"](called["mine"])
    text = "\n".join(own_frames(shell, caught.value))
    assert "mine.py" in text
    assert "library.py" not in text


def test_what_did_not_fit_stays_the_first_row_of_the_table(shell: Any, made: Cell) -> None:
    made("inputs, target = torch.randn(4096, 16), torch.randint(0, 4, (4096,))")
    assert isinstance(made("%%memfit --no-rescue --capacity 600KiB\n" + TRAIN).error, torch.OutOfMemoryError)
    assert made("%%memfit --accumulate 16 --no-rescue --capacity 600KiB\n" + TRAIN).error is None
    assert made("comparison = %memfit report").error is None
    first, second = shell.user_ns["comparison"].measurements
    assert (first.plan, first.fits, first.peak_allocated_bytes) == ("as written", False, 600 * 1024)
    assert first.notes[0].startswith("out of memory: Tried to allocate")
    assert (second.plan, second.fits) == ("--accumulate 16", True)
    assert second.peak_allocated_bytes < 600 * 1024


def test_capacity_of_the_configuration_and_of_the_cell(made: Cell) -> None:
    made("%config MemLab.capacity = '1GiB'")
    assert "CPU ledger (capacity 1.00 GiB)" in made(f"%%memfit\n{TRAIN}").out
    for two_gib in ("2GiB", "2 GiB", "2G", "'2 gib'"):
        assert "CPU ledger (capacity 2.00 GiB)" in made(f"%%memfit --capacity {two_gib}\n{TRAIN}").out


def test_default_flags_of_the_configuration(shell: Any, made: Cell) -> None:
    made("%config MemLab.plan = '--accumulate 3'")
    made(f"%%memfit\n{TRAIN}")
    assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 3"


def test_a_wrong_default_is_refused_when_it_is_set(made: Cell, caplog: pytest.LogCaptureFixture) -> None:
    made("%config MemLab.capacity = '1GX'")
    assert "size '1GX': expected a number above zero and its unit, as in '8GiB', '512MiB' or '24GB'" in caplog.text
    assert made("%config MemLab.capacity").result.result == ""


def test_an_optimizer_made_anew_replaces_the_old_one(shell: Any, made: Cell) -> None:
    made(f"%%memfit --accumulate 4\n{TRAIN}")
    made("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)")
    ran = made(f"%%memfit\n{TRAIN}")
    session = session_of(shell.user_ns["model"])
    assert "Sequential 1.73k · SGD" in ran.out
    assert session.workload.optimizers == [shell.user_ns["optimizer"]]
    assert session.plan.label == "--accumulate 4"


def test_a_plan_switched_by_the_cell_itself_gets_its_own_row(shell: Any, made: Cell) -> None:
    made("import memlab.session")
    made(f"%%memfit\n{TRAIN}")
    ran = made(f"%%memfit\n{TRAIN}memlab.session.session_of(model).switch('--accumulate 2')\n{TRAIN}")
    table = "\n".join(_table(ran.out))
    assert "as written" in table
    assert "--accumulate 2" in table
    assert "step 9: as written → --accumulate 2" in table


def test_quiet_and_short_cells_show_no_progress(made: Cell) -> None:
    assert "a step" not in made(f"%%memfit\n{TRAIN}").out


def test_help_runs_nothing(shell: Any, made: Cell) -> None:
    ran = made("%%memfit -h\nx = 1")
    assert "--accumulate N" in ran.out
    assert "x" not in shell.user_ns


def test_interrupted_training_still_gets_its_receipt(shell: Any, made: Cell) -> None:
    made("%xmode Context")
    ran = made(f"%%memfit\n{TRAIN}raise KeyboardInterrupt")
    assert isinstance(ran.error, KeyboardInterrupt)
    assert "4 steps" in ran.out
    assert (ran.out + ran.err).count("KeyboardInterrupt: ") == 1


def test_a_cell_in_which_nothing_trains_says_so(made: Cell) -> None:
    ran = made("%%memfit --accumulate 4\nmodel.eval()\nwith torch.no_grad():\n    _ = model(inputs)\nmodel.train();")
    assert ran.error is None
    assert (
        "no optimizer step ended in this cell, so nothing was measured; --accumulate 4 is in force on Sequential"
        in ran.out
    )


@pytest.mark.parametrize("flags", ["", "--release-grads"])
def test_a_step_of_which_only_the_update_is_in_the_cell(made: Cell, flags: str) -> None:
    made(f"%%memfit {flags}\noptimizer.zero_grad()\nloss = model(inputs).square().mean()")
    made("%%memfit\nloss.backward()")
    ended = made("%%memfit\noptimizer.step()")
    assert ended.error is None
    plan = flags or "as written"
    said = f"memfit: Sequential was not called in this cell, so nothing was measured; {plan} is in force on Sequential"
    assert ended.out.strip() == said


def test_a_model_that_is_called_only_after_its_training_is_said_to_be_passed_by(cell: Cell) -> None:
    told = cell(
        "%%memfit --accumulate 2\nimport torch\nnet = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "net.forward(torch.ones(4, 3)).sum().backward()\noptimizer.step()\nnet(torch.ones(4, 3));"
    )
    assert told.error is None
    assert "the loop trains Linear without calling it" in told.out
    assert "so nothing was measured; --accumulate 2 is in force on Linear" in told.out


def test_loading_twice_and_unloading_twice(shell: Any, made: Cell) -> None:
    made("%load_ext memlab\n%reload_ext memlab")
    assert [type(c).__name__ for c in shell.configurables].count("MemLab") == 1
    made(f"%%memfit --accumulate 4\n{TRAIN}")
    made("%unload_ext memlab")
    made("%unload_ext memlab")
    assert sessions() == ()
    assert "forward" not in vars(shell.user_ns["model"])
    assert shell.find_line_magic("memfit") is None
    assert shell.find_cell_magic("memfit") is None
    assert "MemLab" not in [type(c).__name__ for c in shell.configurables]


def test_the_shell_is_left_as_it_was(shell: Any, made: Cell) -> None:
    made("%%memfit\n1 / 0")
    made(f"%%memfit\n{TRAIN}")
    assert not {"showtraceback", "_showtraceback"} & set(vars(shell))
    assert "cache" not in vars(shell.compile)
    assert shell.ast_node_interactivity == "last_expr"
    assert sys.displayhook is not None


def test_a_plain_cell_neither_predicts_nor_draws(shell: Any, made: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "memlab.jupyter.prediction.predict_rows", lambda *_: pytest.fail("nobody asked for a prediction")
    )
    made("%config MemLab.predict = True")
    before = set(sys.modules)
    ran = made(f"%%memfit\n{TRAIN}")
    assert ran.error is None, ran.err
    assert not {
        name for name in set(sys.modules) - before if name.split(".")[0] in ("matplotlib", "bitsandbytes", "plotly")
    }


def test_a_cell_that_fails_after_measured_steps_shows_them(made: Cell) -> None:
    ran = made(f"%%memfit\n{TRAIN}1 / 0")
    assert isinstance(ran.error, ZeroDivisionError)
    assert "4 steps" in ran.out
    assert ran.out.index("4 steps") < ran.out.index("ZeroDivisionError")


@pytest.mark.parametrize("after", ["", "reached = model(inputs).sum().item()"], ids=["", "called after the loop"])
@pytest.mark.parametrize("before", [MAKE, f"{MAKE}%%memfit\n{TRAIN}"], ids=["first cell", "after a cell that calls it"])
def test_a_loop_that_goes_past_the_models_call_is_told(cell: Cell, before: str, after: str) -> None:
    for each in before.split("%%"):
        cell(f"%%{each}" if each.startswith("memfit") else each)
    step = f"{STEP.replace('model(inputs)', 'model.forward(inputs)')}\n"
    ran = cell(f"%%memfit --accumulate 2\n{2 * step}{after}")
    assert ran.error is None
    assert ran.out == (
        "memfit: --accumulate 2 had no effect: the loop trains Sequential without calling it (it calls parts of it, its "
        "forward directly, or it within compiled code or a transform of torch.func); call the model itself, or name the part that it calls with --model; nothing was "
        "measured\n"
    )


def test_the_handler_of_ctrl_c_is_the_users_own_between_cells(made: Cell) -> None:
    before = signal.getsignal(signal.SIGINT)
    for _ in range(2):
        assert made(f"%%memfit --release-grads\n{TRAIN}").error is None
        assert signal.getsignal(signal.SIGINT) is before
    assert made(TRAIN).error is None
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_between_two_lines_is_shown_where_it_came(shell: Any, made: Cell) -> None:
    """Python gives cleanup instructions no line, and IPython fails on a traceback entry without one."""
    ran = made(
        """%%memfit
import sys, types
def between():
    try:
        with open("/dev/null"):
            return sys._getframe()
    finally:
        pass
frame = between()
nowhere = next(start for start, _, line in frame.f_code.co_lines() if line is None)
raise KeyboardInterrupt().with_traceback(types.TracebackType(None, frame, nowhere, -1))
"""
    )
    assert isinstance(ran.error, KeyboardInterrupt)
    assert "Unexpected exception formatting exception" not in ran.out + ran.err


class TestMemlabItselfFails:
    """What memlab does not foresee costs the receipt, and not the cell or those that follow."""

    @staticmethod
    def _trained_all_the_same(shell: Any, ran: Any, said: str) -> None:
        assert ran.error is None, ran.err
        assert said in ran.out
        assert {int(state["step"]) for state in shell.user_ns["optimizer"].state.values()} == {4}

    @pytest.mark.parametrize(
        ("where", "said"),
        [
            (
                "memlab.jupyter.cell_magic.Workload.find",
                "memfit: the search for the model among the variables failed in memlab itself (KeyError: 'unexpected'); "
                "the cell is not affected",
            ),
            (
                "memlab.jupyter.cell_meter.meter_of",
                "memfit: watching this cell failed in memlab itself (KeyError: 'unexpected'); the cell is not affected",
            ),
            (
                "memlab.jupyter.watch.title_of",
                "memfit: the receipt failed in memlab itself (KeyError: 'unexpected'); the cell is not affected",
            ),
            (
                "memlab.jupyter.cell_meter.Meter.measurement",
                "memfit: the receipt failed in memlab itself (KeyError: 'unexpected'); the cell is not affected",
            ),
        ],
    )
    def test_the_cell_trains(
        self, shell: Any, made: Cell, monkeypatch: pytest.MonkeyPatch, where: str, said: str
    ) -> None:
        monkeypatch.setattr(where, _fail)
        self._trained_all_the_same(shell, made(f"%%memfit\n{TRAIN}"), said)

    @pytest.mark.parametrize(
        ("where", "what"),
        [
            ("first_call.Workload", "taking up a model"),
            ("first_call.live_optimizers", "looking for models"),
            ("watch._session_for", "taking up a model"),
        ],
    )
    def test_a_cell_that_makes_its_model_trains(
        self, shell: Any, cell: Cell, monkeypatch: pytest.MonkeyPatch, where: str, what: str
    ) -> None:
        before = torch.nn.Module.__call__
        monkeypatch.setattr(f"memlab.jupyter.{where}", _fail)
        ran = cell(f"%%memfit\n{MAKE}\n{TRAIN}")
        said = f"memfit: {what} failed in memlab itself (KeyError: 'unexpected'); the cell is not affected"
        self._trained_all_the_same(shell, ran, said)
        assert torch.nn.Module.__call__ is before

    def test_an_optimizer_that_cannot_be_looked_at(
        self, shell: Any, made: Cell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("memlab.jupyter.first_call.steps_some_of", _fail)
        ran = made(f"%%memfit\nother = torch.optim.SGD([torch.zeros(1, requires_grad=True)])\nother.step()\n{TRAIN}")
        self._trained_all_the_same(shell, ran, "memfit: looking for further models failed in memlab itself")
        assert "as written" in ran.out

    def test_an_error_of_the_cells_stays_the_cells(self, made: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("memlab.jupyter.cell_records.events_of", _fail)
        ran = made(f"%%memfit\n{TRAIN}\n1 / 0")
        assert isinstance(ran.error, ZeroDivisionError)

    @pytest.mark.parametrize("where", ["watch._session_for", "first_call.live_optimizers"])
    def test_a_plan_that_was_asked_for_is_not_left_out(
        self, shell: Any, cell: Cell, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        monkeypatch.setattr(f"memlab.jupyter.{where}", _fail)
        assert isinstance(cell(f"%%memfit --checkpoint\n{MAKE}\n{TRAIN}").error, KeyError)
        optimizer = shell.user_ns.get("optimizer")
        assert optimizer is None or optimizer.state == {}


def _fail(*_args: Any, **_named: Any) -> Any:
    raise KeyError("unexpected")


def test_a_loop_that_calls_a_teacher_in_inference_mode_is_measured_to_its_end(cell: Cell) -> None:
    assert cell(f"{MAKE}teacher = torch.nn.Linear(16, 4)").error is None
    loop = "for _ in range(4):\n    output = model(inputs)\n    with torch.inference_mode():\n        aim = teacher(inputs)\n"
    step = "    torch.nn.functional.mse_loss(output, aim.clone()).backward()\n    optimizer.step()\n    optimizer.zero_grad()"
    ran = cell(f"%%memfit\n{loop}{step}")
    assert ran.error is None
    assert "failed" not in ran.out
    assert "4 steps" in ran.out
