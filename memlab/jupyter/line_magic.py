"""`LineMagic`: `%memfit`. A word per command; each calls the Python API and returns what it made."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from memlab.errors import PlanError, TraceError, WorkloadError
from memlab.exporting import export, parsed
from memlab.jupyter import prediction
from memlab.jupyter.display import PredictedPlans, show, show_picture, tell
from memlab.jupyter.flags import WORDS, line_help
from memlab.jupyter.notebook import Notebook
from memlab.jupyter.panel import bring_up_to_date, open_live, open_recorded
from memlab.jupyter.parser import plans_in, predict_options, processes, split_words, unknown_of_line, unknown_word
from memlab.jupyter.state import IN_NO_VARIABLE, state_text
from memlab.measuring.device import Device, device_for
from memlab.measuring.runs import compare
from memlab.plan import Plan
from memlab.records.ablation import Ablation
from memlab.records.comparison import Comparison, FoundPlan
from memlab.records.ranks import PredictedRanks
from memlab.records.run_record import RunRecord
from memlab.runtime.workload import Workload
from memlab.session import fit, session_of, sessions, switch_together
from memlab.units import parse_bytes

Shown = Comparison | PredictedPlans | PredictedRanks | FoundPlan | Ablation


class LineMagic:
    """Runs the command that a line names."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook

    def run(self, line: str) -> Shown | None:
        """Do what one line says; see `line_help`."""
        words = split_words(line)
        if not words:
            print(self._state())  # noqa: T201 - what was asked for
            return None
        if words[0] in ("-h", "--help"):
            words[0] = "help"
        if words[0].startswith("-"):
            words.insert(0, "switch")
        word = next((each for each in WORDS if each.word == words[0]), None)
        if word is None:
            raise unknown_word(words[0])
        if not word.arguments:
            _no_more(words[1:], word.word)
        if words[0] in _NOT_WHILE_TRAINING:
            self._notebook.background.require_rest(f"%memfit {words[0]}")
        # each word has a method of its name
        command: Callable[[list[str]], Shown | None] = getattr(self, f"_{words[0]}")
        return command(words[1:])

    def _state(self) -> str:
        shown = []
        for session in self._notebook.sessions():
            history = self._notebook.history_with(session.workload.model)
            shown.append(state_text(session, history, self._notebook.shell.user_ns, self._notebook.config.capacity))
        return "\n\n".join(shown) or f"memfit: {self._notebook.nothing_applied()}"

    def _report(self, words: list[str]) -> Comparison:
        comparison = self._notebook.history().require()
        show_picture(self._notebook.shell, comparison, self._notebook.config)
        return comparison

    def _panel(self, words: list[str]) -> None:
        options = predict_options("panel", words)
        workloads, history = self._notebook.subject("panel", options, needs_batch=False)
        # what is asked for one of several models is for all
        workload = workloads[0]
        control = self._notebook.control_of(workload.model)
        budget = options.budget or self._notebook.config.budget
        control.begin(workload, self._notebook.config.capacity_bytes, parse_bytes(budget) if budget else None)
        bring_up_to_date(control, history)
        self._notebook.remember(workload)
        opened = open_live(self._notebook.panels, self._notebook.shell, control)
        if opened is not None:
            show(opened)

    def _predict(self, words: list[str]) -> PredictedPlans | PredictedRanks | Comparison:
        options = predict_options("predict", words)
        workloads, history = self._notebook.subject("predict", options)
        if options.scale is not None:
            workload = prediction.only_one(f"predict --scale {options.scale.engine}", workloads)
            return prediction.predicted_ranks(workload, options, options.scale, history)
        budget = (
            options.budget or self._notebook.config.budget or ("" if options.device else self._notebook.config.capacity)
        )
        with self._notebook.saying() as say:
            try:
                predicted_plans = prediction.predicted_plans(workloads, options, budget, history, say)
            except TraceError as error:
                if options.plan is not None or options.plans or options.device:
                    raise
                why = str(error)
            else:
                show_picture(self._notebook.shell, predicted_plans, self._notebook.config)
                return predicted_plans
        workload = prediction.only_one("predict", workloads)
        tell(f"{why}; so one step of the plan as written is measured")
        with self._device_of(workload) as device, self._notebook.saying() as say:
            return prediction.measured_instead(workload, device, say)

    def _device_of(self, workload: Workload) -> closing[Device]:
        return closing(device_for(workload.device, self._notebook.config.capacity_bytes))

    def _find(self, words: list[str]) -> FoundPlan:
        from memlab.search import find_plan

        options, config = predict_options("find", words), self._notebook.config
        workloads, history = self._notebook.subject("find", options)
        budget = options.budget or config.budget or config.capacity
        if not budget:
            raise PlanError("%memfit find needs a budget, as in %memfit find --budget 8GiB")
        with self._notebook.saying() as say, prediction.advised(prediction.COMPARE):
            say(f"finding a plan for {budget}")
            found = find_plan(
                workloads,
                budget,
                lossless=options.lossless,
                fixed=options.plan or Plan(),
                progress=say,
            )
        history.plan_space = found.predictions
        show_picture(self._notebook.shell, found, config)
        tell(f"to apply it: %memfit {str(found.plan) or '--accumulate 1'}")
        return found

    def _ablation(self, words: list[str]) -> Ablation:
        from memlab.search import ablation

        options = predict_options("ablation", words)
        workload = prediction.only_one("ablation", self._notebook.subject("ablation", options)[0])
        with self._device_of(workload) as device, self._notebook.saying() as say:
            say("adding techniques")
            found = ablation(
                workload,
                options.plans or None,
                budget=options.budget or self._notebook.config.budget,
                fixed=options.plan or Plan(),
                lossless=options.lossless,
                steps=options.steps,
                device=device,
                progress=lambda line: say(f"ablation, {line}"),
            )
        found = replace(found, title=f"memfit ablation · {found.title}")
        show_picture(self._notebook.shell, found, self._notebook.config)
        tell(f"to apply it: %memfit {found.plan if found.plan != Plan().label else '--accumulate 1'}")
        return found

    def _worst(self, words: list[str]) -> Comparison:
        options = predict_options("worst", words)
        subject = self._notebook.subject("worst", options, needs_batch=False)
        workload = prediction.only_one("worst", subject[0])
        session = session_of(workload.model)
        plan = options.plan or (session.plan if session is not None else Plan())
        if len(options.words) > 1:
            raise PlanError("%memfit worst takes one loader, as in %memfit worst loader")
        from memlab.jupyter import worst

        loader = worst.loader_in(self._notebook.shell.user_ns, next(iter(options.words), ""))
        with self._device_of(workload) as device, self._notebook.saying() as say:
            return worst.rehearsed(workload, loader, plan, device, say)

    def _snapshot(self, words: list[str]) -> None:
        from memlab.predicting import save_snapshot

        options = predict_options("snapshot", words)
        workload = prediction.only_one("snapshot", self._notebook.subject("snapshot", options)[0])
        if len(options.words) != 1:
            raise PlanError("%memfit snapshot needs one file name, as in %memfit snapshot step.pickle --predicted")
        session = session_of(workload.model)
        plan = options.plan or (session.plan if session is not None else Plan())
        with self._notebook.saying() as say:
            is_recorded = not options.predicted and workload.device.type == "cuda"
            say(f"{'recording' if is_recorded else 'predicting'} a step of {plan.label}")
            file = save_snapshot(options.words[0], workload, plan, options.device, measured=is_recorded)
        tell(f"{plan.label}, saved to {file}; open it at https://docs.pytorch.org/memory_viz")

    def _compare(self, words: list[str]) -> Comparison:
        if not words:
            raise PlanError(
                '%memfit compare: name the plans, each in quotes, as in %memfit compare "--accumulate 4" "--checkpoint"'
            )
        plans = [Plan.parse(word) for word in plans_in(words)]
        live = [each.workload for each in self._notebook.together()]
        workloads = [prediction.with_loop(each, self._notebook.history_of) for each in live]
        if any(each.batch is None for each in workloads):
            raise WorkloadError("%memfit compare needs a batch: run a %%memfit cell that trains first")
        with self._notebook.saying() as say:
            with self._device_of(workloads[0]) as device:
                compared = compare(workloads, plans, device=device, progress=lambda text: say(f"comparing, {text}"))
            is_known = len(workloads) == 1 or workloads[0].tape is not None
            if not (self._notebook.config.predict and is_known):
                return compared
            return prediction.with_predictions(compared, workloads, say)

    def _switch(self, words: list[str]) -> None:
        if not words:
            raise PlanError("%memfit switch needs the flags of a plan, as in %memfit switch --accumulate 4")
        plan, rest = Plan.parse_known(words)
        if rest:
            raise unknown_of_line(rest[0])
        waiting = None if sessions() else Workload.find(self._notebook.shell.user_ns)
        if waiting is not None and plan.adapters.what_was_learnt != "keep":
            with fit(waiting, plan) as session:  # what was learnt waits without a plan
                answers = session.log.answers(0)
            for answer in answers:
                tell(answer)
            return
        together = self._notebook.together()
        before, now = together[0].plan, not any(self._notebook.background.trains(s.workload.model) for s in together)
        known = [len(each.log) for each in together]
        switch_together(together, plan, now=now)
        where = f" on {' and '.join(each.workload.name for each in together)}"
        when = "" if now else " at the next step"
        said = f"{before.label} → {plan.label}{where}{when}" if before != plan else f"{plan.label} is in force{where}"
        tell(said)
        for answer in (text for each, count in zip(together, known, strict=True) for text in each.log.answers(count)):
            tell(answer)
        if self._notebook.has_left(together):
            tell(IN_NO_VARIABLE.format(together[0].workload.name))

    def _wait(self, words: list[str]) -> None:
        tell(self._notebook.background.wait())

    def _cancel(self, words: list[str]) -> None:
        tell(self._notebook.background.cancel())

    def _undo(self, words: list[str]) -> None:
        everywhere = words == ["all"]
        _no_more([] if everywhere else words, "undo")
        undone = self._notebook.sessions()
        if undone and not everywhere:
            undone = self._notebook.together()
        running = self._notebook.running.get(threading.get_ident())
        measured = running.models.sessions if running is not None else []
        for session in undone:
            model = session.workload.model
            if session in measured:  # by the cell that this line stands in, which is measured to its end
                is_here = session.position.is_on_this_thread
                session.switch(Plan(), now=is_here)
                tell(f"{session.workload.name} is as written from {'here' if is_here else 'the next step'} on")
                continue
            known = len(session.log)
            session.undo()
            self._notebook.control_of(model).steering.undone()
            history = self._notebook.histories.get(model)
            if history is not None:
                history.batch = history.tape = None
            tell(f"{session.workload.name} is as it was")
            for answer in session.log.answers(known):
                tell(answer)
        left = [f"{session.plan.label} on {session.workload.name}" for session in sessions() if session.plan != Plan()]
        if left:
            tell(f"still in force: {', '.join(left)}; %memfit undo all removes it")
        if not undone:
            tell("nothing to undo")

    def _export(self, words: list[str]) -> None:
        to = words.pop(0) if words and not words[0].startswith("-") else "torch"
        # a plan may stand in quotes, and so may a size with its unit
        nproc, words = _nproc_in([one for word in words for one in (word.split() if word[:1] == "-" else [word])])
        together = self._notebook.together() if not words or sessions() else []
        plan = parsed(shlex.join(words)) if words else together[0].plan
        names = [each.workload.name for each in together]
        print(export(plan, to, nproc=nproc, models=names))  # noqa: T201 - what was asked for

    def _device(self, words: list[str]) -> None:
        if words:
            self._notebook.config.capacity = _capacity_in(words)
        session = next(iter(self._notebook.sessions()), None)
        where = session.workload.device if session is not None else _default_device()
        device = device_for(where, self._notebook.config.capacity_bytes)
        device.close()
        limit = "" if self._notebook.config.capacity else ", with the memory it has"
        tell(f"memory is counted on {device.name}{limit}")

    def _record(self, words: list[str]) -> None:
        file = _file_in(words, "record")
        control = self._notebook.control()
        record = self._notebook.history().record(control.moment() if control is not None else None)
        record.save(file)
        tell(f"saved to {file}; %memfit replay shows it again, on a machine without a GPU as well")

    def _replay(self, words: list[str]) -> Comparison:
        record = RunRecord.load(_file_in(words, "replay"))
        if not open_recorded(self._notebook.panels, self._notebook.shell, record):
            show_picture(self._notebook.shell, record.comparison, self._notebook.config)
        return record.comparison

    def _bug(self, words: list[str]) -> None:
        from memlab.support import bug

        sessions = self._notebook.sessions()
        histories = [self._notebook.history_with(each.workload.model) for each in sessions] or [
            self._notebook.history()
        ]
        text = bug.report(sessions, histories, bug.last_error())
        print(text)  # noqa: T201 - what was asked for
        if words:
            file = _file_in(words, "bug")
            file.write_text(text, encoding="utf-8")
            tell(f"saved to {file}: read it before you send it")
        else:
            tell("this is all that %memfit bug FILE would write; nothing has been sent")

    def _help(self, words: list[str]) -> None:
        print(line_help())  # noqa: T201 - what was asked for


# they change the model, or need it to stand still
_NOT_WHILE_TRAINING = frozenset({"predict", "find", "ablation", "compare", "worst", "snapshot", "undo"})


def _no_more(words: list[str], command: str) -> None:
    if words:
        raise PlanError(f"%memfit {command} {words[0]}: unknown; see %memfit help")


def _capacity_in(words: list[str]) -> str:
    flag, has_value, value = words[0].partition("=")
    rest = words[1:]
    if flag == "--capacity" and not has_value and rest:
        value, rest = "".join(rest), []  # as in 8 GiB
    if flag != "--capacity" or not value or rest:
        raise PlanError(
            f"%memfit device {' '.join(words)}: expected --capacity SIZE, as in --capacity 4GiB, or --capacity none"
        )
    if value == "none":
        return ""
    parse_bytes(value)
    return value


def _nproc_in(words: list[str]) -> tuple[int, list[str]]:
    """Return what ``--nproc`` says, two where it is not there, and the other words."""
    at = next((place for place, word in enumerate(words) if word.partition("=")[0] == "--nproc"), None)
    if at is None:
        return 2, words
    _, is_joined, number = words[at].partition("=")
    behind = words[at + 1 :]
    if not is_joined:
        number, behind = "".join(behind[:1]), behind[1:]
    return processes(number), [*words[:at], *behind]


def _file_in(words: list[str], command: str) -> Path:
    if len(words) != 1:
        raise PlanError(f"%memfit {command} needs one file name, as in %memfit {command} run.json")
    return Path(words[0])


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
