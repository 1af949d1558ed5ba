"""`Tracer`: fake steps, or the parts of one, of the same `Session` on a twin.

A step is made of *passes* (forward and backward of one micro-batch) and an *update* (the optimizers' step). Whole
steps are traced for a single plan; for a space of plans each part is traced once and the rest is composed.
"""

from __future__ import annotations

import functools
import gc
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memlab.errors import MemlabError, TraceError, WorkloadError
from memlab.hardware.roofline import Bill
from memlab.measuring.holdings import Holding, LedgerObserver, gradients_of, inputs_of, parameters_of, state_of
from memlab.measuring.observation import STEP, Observation
from memlab.measuring.runs import call_of, loss_in, output_of
from memlab.plan import Gradients, Plan
from memlab.records import Category
from memlab.runtime.aliases import GradientsBefore
from memlab.runtime.batch import Batch
from memlab.runtime.lazy import LazyTensor
from memlab.runtime.mechanisms import SeenInCalls, brought
from memlab.runtime.model_state import State
from memlab.runtime.modules import CacheOff, accepts_use_cache, without_global_hooks
from memlab.runtime.own_steps import own_steps
from memlab.runtime.reach import passing_by
from memlab.runtime.rng import of_cpu_alone
from memlab.runtime.rounds import rounds_told_to
from memlab.runtime.stand_ins import stand_in
from memlab.runtime.tree import flatten, tensors_in
from memlab.runtime.workload import Workload
from memlab.session import Session, fit
from memlab.session.replay import Replay
from memlab.session.tape import Tape
from memlab.techniques.accumulation.accumulation import Accumulation
from memlab.techniques.accumulation.probe import LEAST_ROWS, Probe
from memlab.techniques.accumulation.split import Call, Layout, row_ranges
from memlab.techniques.checkpointing.checkpointing import main_blocks
from memlab.techniques.checkpointing.rerun import reruns_told_to
from memlab.trace.depth import FEWER, KEPT, Cut, are_same, cut_of, deepened, notes_of_more
from memlab.trace.fast_fakes import FastFakes, recipes_for
from memlab.trace.marks import Mark, MarkedEvents, marking
from memlab.trace.recorder import Hidden, Inside, Priced, Recorder
from memlab.trace.twin import Twin

# optimizer state appears in the first step: the second one is like all that follow
_STEPS = 2
_log_of_fakes = logging.getLogger("torch._subclasses.fake_tensor")
_NO_LOSS = "the loop's own loss function is not known here: what it computes from the model's outputs is left out"


@dataclass(frozen=True)
class Choices:
    """Context in which operators on the twin choose what they would choose on its device."""

    entered: Callable[[], AbstractContextManager[Any]] = nullcontext  # context in which steps run
    inside: Inside | None = None  # the temporaries inside an operator; None where none are known


@dataclass(frozen=True)
class Trace:
    """Observations of a step, or a part of one, on the twin."""

    observation: Observation  # births and deaths, on top of what lived before
    priced: tuple[Priced, ...]  # operators that did work, in order
    hidden: tuple[Hidden, ...]  # what lived inside operators
    samples: int  # rows that went in
    tokens: int  # tokens that went in
    host_bytes: int  # bytes techniques would keep off the device
    notes: tuple[str, ...]  # what techniques had to say, and what was left out
    outputs: tuple[int, ...] = ()  # numbers of the storages the model's outputs lie in, beside scalars
    trained: frozenset[int] = frozenset()  # numbers of the parameters that got a gradient
    # number of the storage that the first product of matrices filled, outside of backward and in it
    products: Mapping[bool, int] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()  # of gradients, and of the modules that were to be marked, in order
    is_decided: bool = False  # whether the first pass decides how those after it are run

    @property
    def has_surrogate_loss(self) -> bool:
        """Return whether the loop's own loss is not known, and something in its place was differentiated."""
        return _NO_LOSS in self.notes

    @functools.cached_property
    def settled(self) -> dict[int, int]:
        """Return the number of births and deaths before a gradient was complete, by number of its storage."""
        return {mark.storage: mark.event for mark in self.marks if mark.moment is MarkedEvents.SETTLED}

    @functools.cached_property
    def copied(self) -> frozenset[int]:
        """Return numbers of storages to which gradients were copied; where there are some already, they are added to those."""
        return frozenset(mark.storage for mark in self.marks if mark.is_copy)

    @functools.cached_property
    def before(self) -> dict[Category | None, dict[int, int]]:
        """Return bytes of what lived before, by category and number."""
        found: dict[Category | None, dict[int, int]] = {}
        for number, size_bytes in self.observation.baseline.items():
            found.setdefault(self.observation.categories.get(number), {})[number] = size_bytes
        return found

    @functools.cached_property
    def dying(self) -> frozenset[int]:
        """Return numbers of what ends, or gets smaller."""
        return frozenset(number for _, size_bytes, number, _ in self.observation.raw if size_bytes < 0)

    @functools.cached_property
    def bill(self) -> Bill:
        return Bill.of(
            replace(each.work, updating=each.work.kernels) if each.moment == STEP else each.work for each in self.priced
        )


class Tracer:
    """Traces steps of one workload. Raises `TraceError`: the model cannot be copied.

    Over 300 lines: passes, looks and updates are traced on one twin, which each leaves as it found it.
    """

    def __init__(
        self,
        workload: Workload,  # the live objects with a batch; never touched
        device: torch.device | None = None,  # the twin says it is on; by default the workload's
        choices: Choices | None = None,  # what makes operators choose as on that device
        others: Sequence[Workload] = (),  # those of the other models that train in the same loop
        capability: tuple[int, int] | None = None,  # of the device, where it is a GPU of NVIDIA's
    ) -> None:
        self._live = [workload, *others]
        self._choices = choices or Choices()
        self.twin = Twin(workload, device, capability)
        self.twins = [self.twin, *(Twin(other, device, capability, self.twin) for other in others)]
        # modules of the twin that are marked in passes (see `memlab.trace.marks`); None where nobody looks at marks of modules
        self.marked: Sequence[nn.Module] | None = None
        self._fakes = FastFakes(self.twin.fake_mode, recipes_for(self._choices))
        # by plan and use of the cache: the notes on its passes, where they follow from those of a few blocks; else None
        self._followed: dict[tuple[Plan, bool], tuple[str, ...] | None] = {}
        self._parameters = {id(p): number for number, p in enumerate(self.twin.workload.model.parameters())}

    def steps(self, plan: Plan) -> list[Trace]:
        """Trace whole steps, from fresh optimizer state.

        Returns:
            One trace per step: the first, which creates optimizer state, and one like all that follow.

        Raises:
            RefusalError: a technique of the plan does not apply.
            TraceError: what the model computes depends on values.
        """
        with self._session(plan) as (session, seen):
            return [self._step(session, seen) for _ in range(_STEPS)]

    def steps_of_tape(self, plan: Plan, tape: Tape) -> list[Trace]:
        """Trace steps of a loop as they were recorded; else as `steps`."""
        watched: list[Trace] = []
        if plan.gradients is Gradients.RELEASE:  # it looks at the first step of a loop, and refuses it or not
            with self._replay(plan, tape, is_known=False) as (replay, all_of_them):
                watched = [self._step_of_tape(replay, all_of_them)]
        with self._replay(plan, tape) as (replay, all_of_them):
            return [*watched, *(self._step_of_tape(replay, all_of_them) for _ in range(_STEPS))]

    def passes_of_tape(self, plan: Plan, tape: Tape) -> tuple[Trace, Trace]:
        """Trace what a recorded step of one model does before its update, the first time and later; else as `passes_in_parts`."""
        with self._replay(plan, tape) as (replay, all_of_them):
            ((session, seen),) = all_of_them
            first, second = (_before_update(self._step_of_tape(replay, all_of_them), seen) for _ in range(_STEPS))
            return replace(first, is_decided=_learn_from_calls(session)), second

    @contextmanager
    def _replay(
        self, plan: Plan, tape: Tape, *, is_known: bool = True
    ) -> Iterator[tuple[Replay, list[tuple[Session, _StepObserver]]]]:
        with self._sessions(plan, is_known=is_known) as all_of_them:
            pairs = [(live, twin.workload) for live, twin in zip(self._live, self.twins, strict=True)]
            replay = Replay(
                tape,
                {id(live.model): twin.model for live, twin in pairs},
                {id(a): b for live, twin in pairs for a, b in zip(live.optimizers, twin.optimizers, strict=True)},
                self.twin.stand_in,
            )
            if any(optimizer.state for each in self._live for optimizer in each.optimizers):
                self._make_state(seen for _, seen in all_of_them)
            all_of_them[0][1].recorder.start()
            replay.begin()
            yield replay, all_of_them

    def _make_state(self, models: Iterable[_StepObserver]) -> None:
        """Take a first update, for steps of which none is the first."""
        for seen in models:
            seen.recorder.start()
            for parameter in seen.workload.model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            self._update(seen)
            seen.workload.model.zero_grad(set_to_none=True)

    def _step_of_tape(self, replay: Replay, all_of_them: Sequence[tuple[Session, _StepObserver]]) -> Trace:
        recorder = all_of_them[0][1].recorder
        before: list[Priced] = []

        def first_call() -> None:
            """Begin where a meter does: what the loop does before it calls a model takes time, and leaves what it leaves."""
            for _, seen in all_of_them:
                seen.first_call = None
            before[:] = [replace(each, event=0) for each in recorder.priced]
            if len(all_of_them) == 1:
                recorder.leave_data()
            recorder.begin(
                holding  # none of them is kept: the loop drops gradients
                for session, seen in all_of_them
                for of in (
                    parameters_of(seen.workload.model),
                    gradients_of(seen.workload.model),
                    _held(session),
                    state_of(seen.workload.optimizers),
                )
                for holding in of
            )

        for _, seen in all_of_them:
            seen.first_call = first_call
            seen.start()
        if len(all_of_them) > 1:  # which of them is called first, and how often for a step, is the loop's
            first_call()
        replay.step()
        for _, seen in all_of_them:
            recorder.know([*state_of(seen.workload.optimizers), *parameters_of(seen.workload.model)])
        found = [seen.finish(session) for session, seen in all_of_them]
        return replace(
            found[0],
            priced=(*before, *found[0].priced),
            samples=min(each.samples for each in found),
            tokens=min((each.tokens for each in found if each.tokens), default=0),
            host_bytes=sum(each.host_bytes for each in found),
            notes=tuple(dict.fromkeys(note for each in found for note in each.notes)),
        )

    @property
    def uses_cache(self) -> bool:
        """Return whether the model call as written fills a key-value cache, which accumulation switches off."""
        workload = self.twin.workload
        return accepts_use_cache(workload.model) and call_of(workload).kwargs.get("use_cache") is not False

    def one_pass(
        self,
        plan: Plan,  # of which the settings that work on the model count
        rows: int | None = None,  # of the batch; by default as many as it has. Others are made by repeating rows
        *,
        use_cache: bool = True,  # False switches the model's key-value cache off, as accumulation does
        after: int | None = None,  # where calls decide how later ones are run, one of so many rows went before
        is_first: bool = False,  # none went before
    ) -> Trace:
        """Trace forward and backward of one batch, without gradients before."""
        if after is None and not is_first and self.marked is None:
            if plan == Plan() and rows is None and use_cache:
                return self._as_written
            if self._is_cut_exact and (trace := self._pass_of_cut(plan, rows, use_cache=use_cache)) is not None:
                return trace
        return self._pass_of_all(plan, rows, use_cache=use_cache, after=after, is_first=is_first)

    def _pass_of_all(
        self,
        plan: Plan,
        rows: int | None = None,
        *,
        use_cache: bool = True,
        after: int | None = None,
        is_first: bool = False,
    ) -> Trace:
        workload = self._pass_of(rows, use_cache=use_cache)
        with self._session(plan) as (session, seen):
            earlier = (workload,) if after is None else (self.twin.with_rows(self._layout, after), workload)
            for each in () if is_first else earlier:
                self._let_learn(session, each, seen)
            return self._one_pass(session, seen, workload)

    @functools.cached_property
    def _as_written(self) -> Trace:
        return self._pass_of_all(Plan())

    @functools.cached_property
    def _cut(self) -> Cut | None:
        return cut_of(self.twin.workload) if len(self.twins) == 1 else None

    @functools.cached_property
    def _is_cut_exact(self) -> bool:
        """Return whether the pass as written follows from that of the model cut to a few blocks."""
        if self._cut is None:
            return False
        model = self.twin.workload.model
        has_blocks = bool(main_blocks(model))
        with self._cut.made(FEWER):
            if bool(main_blocks(model)) is not has_blocks:
                return False
        whole = self._as_written
        self._followed[Plan(), True] = whole.notes
        trace = self._pass_of_cut(Plan(), None, use_cache=True)
        return trace is not None and are_same(trace, whole) and trace.trained == whole.trained

    def _pass_of_cut(self, plan: Plan, rows: int | None, *, use_cache: bool) -> Trace | None:
        """Trace a pass of the model cut to a few blocks, as one of the whole; None where it does not follow."""
        cut, checkpointing = self._cut, plan.checkpointing
        # with a cache there is more that could count blocks
        settings = (plan, use_cache or self._followed.get((plan, True)) is not None)
        if checkpointing.every > 1 or checkpointing.budget_bytes is not None or plan.adapters.is_on:
            return None  # what these do to a block depends on the others
        if cut is None or self._followed.get(settings, ()) is None:
            return None
        workload = self._pass_of(rows, use_cache=use_cache)
        try:
            found = self._deepened_pass(plan, workload, cut, FEWER)
            if found is not None and settings not in self._followed:
                longer = self._deepened_pass(plan, workload, cut, KEPT)
                if longer is not None and are_same(found, replace(longer, notes=found.notes)):
                    notes = notes_of_more(found.notes, longer.notes, len(cut.blocks) - KEPT)
                    self._followed[settings] = notes
        except MemlabError:  # the whole model says why
            found = None
        notes = self._followed.setdefault(settings, None)
        if found is None or found.is_decided or notes is None:
            return None
        alike = zip(*(block.parameters() for block in cut.blocks[1:]), strict=True)
        numbers = ([self._parameters[id(p)] for p in each] for each in alike)
        trained = (each for each in numbers if each[0] in found.trained)
        return replace(found, trained=found.trained.union(*trained), notes=notes)

    def _deepened_pass(self, plan: Plan, workload: Workload, cut: Cut, kept: int) -> Trace | None:
        """Trace a pass of so many blocks, as one of all but for notes and what trains; None where that does not follow."""
        with cut.made(kept), self._session(plan) as (session, seen):
            trace, blocks = self._one_pass(session, seen, workload, cut), cut.repeated(seen.recorder)
        return deepened(trace, blocks, len(cut.blocks) - kept)

    def passes_in_parts(self, plan: Plan) -> tuple[Trace, Trace]:
        """Trace the first pass of a batch that accumulation splits, and one like all that follow."""
        workload = self.twin.workload
        with self._session(plan) as (session, seen):
            first = self._one_pass(session, seen, workload)
            workload.model.zero_grad(set_to_none=True)
            return first, self._one_pass(session, seen, workload)

    def _pass_of(self, rows: int | None, *, use_cache: bool) -> Workload:
        workload = self.twin.workload if rows is None else self.twin.with_rows(self._layout, rows)
        if use_cache or workload.loss_fn is not None:
            return workload
        call = call_of(workload)
        options = CacheOff(Accumulation.field).options(workload.model, workload.name, call.kwargs)
        return self.twin.with_batch(Batch(call.args, options))

    def _one_pass(self, session: Session, seen: _StepObserver, workload: Workload, cut: Cut | None = None) -> Trace:
        seen.begin(session, workload)
        marks: list[Mark] = []
        watched = nullcontext() if cut is None else cut.watched(seen.recorder, marks)
        with marking(workload.model, self.marked or (), seen.recorder, marks), watched:
            loss = self._backward(workload, seen)
        seen.recorder.know(gradients_of(workload.model))
        numbers = self._numbers(session.plan)
        trained = frozenset(numbers[id(p)] for p in workload.model.parameters() if p.grad is not None)
        found = seen.finish(session, trained=trained)
        trace = replace(found, marks=tuple(marks), is_decided=_learn_from_calls(session))
        del loss
        return trace

    def _numbers(self, plan: Plan) -> Mapping[int, int]:
        """Return the number of each parameter, by its id; where adapters are in the model, theirs among them."""
        if not plan.adapters.is_on:
            return self._parameters
        return {id(p): number for number, p in enumerate(self.twin.workload.model.parameters())}

    def _let_learn(self, session: Session, workload: Workload, seen: _StepObserver) -> None:
        """Run a forward beforehand where the first one decides how those after it are run."""
        if _learn_from_calls(session):
            seen.begin(session, workload)
            output_of(workload)

    def one_graph(self) -> int:
        """Bytes that one forward keeps for a backward pass, in eval mode: what gradients cost when nobody asks for them.

        Raises:
            TraceError: what the model computes depends on values.
        """
        with self._session(Plan()) as (_, seen):
            seen.workload.model.eval()
            return _kept(seen, with_graph=True) - _kept(seen, with_graph=False)

    def applying(self, plan: Plan) -> tuple[Trace, list[int]]:
        """Trace how a plan is applied to a model in its own precision.

        Returns:
            The trace, and the numbers of what lives then, in the order in which an update finds it.
        """
        workload = self.twin.workload
        lived = [*parameters_of(workload.model), *inputs_of(call_of(workload))]
        with self._session(plan, before=lived) as (session, seen):
            held = [tensor for _, tensor in (*parameters_of(workload.model), *_held(session))]
            numbers = list(dict.fromkeys(seen.recorder.numbers_of(held)))
            return seen.finish(session), numbers

    def updates(self, plan: Plan, trained: Iterable[int]) -> tuple[Trace, Trace]:
        """Trace the first update of these parameters, which creates optimizer state, and one like all that follow."""
        chosen = set(trained)
        with self._session(plan) as (session, seen):
            model = seen.workload.model
            held = [*parameters_of(model), *_held(session)]
            parameters = [p for n, p in enumerate(model.parameters()) if n in chosen]
            first, second = (self._one_update(session, seen, held, parameters) for _ in range(_STEPS))
            return first, second

    def update_of_flats(self, elements: Sequence[int]) -> Trace:
        """Trace an update like all that follow the first, of optimizers that step one flat tensor of so many elements for each group."""
        with self._session(Plan()) as (session, seen):
            groups = [group for optimizer in seen.workload.optimizers for group in optimizer.param_groups]
            before = [group["params"] for group in groups]
            try:
                for group, size in zip(groups, elements, strict=True):
                    group["params"] = [self._flat(size)] if size else []
                parameters = [parameter for group in groups for parameter in group["params"]]
                held = [(Category.PARAMETERS, parameter) for parameter in parameters]
                return [self._one_update(session, seen, held, parameters) for _ in range(_STEPS)][-1]
            finally:
                for group, parameters in zip(groups, before, strict=True):
                    group["params"] = parameters

    def _flat(self, elements: int) -> nn.Parameter:
        with self.twin.fake_mode:
            return nn.Parameter(torch.empty(elements, device="cpu"))

    def _one_update(
        self, session: Session, seen: _StepObserver, held: Iterable[Holding], parameters: Sequence[nn.Parameter]
    ) -> Trace:
        """An update of parameters, each with a gradient; what is held lives before it."""
        for parameter in parameters:
            parameter.grad = self._fakes.like(parameter)
        gradients = [(Category.GRADIENTS, parameter.grad) for parameter in parameters]
        seen.recorder.begin([*held, *gradients, *state_of(seen.workload.optimizers)])
        seen.start()
        self._update(seen)
        return seen.finish(session)

    def one_probe(self, parts: int) -> Trace:
        """Trace the look at a few rows that accumulation takes before it first splits a batch.

        Raises:
            RefusalError: the batch does not split.
        """
        with self._session(Plan()) as (session, seen):
            workload = seen.workload
            probe = Probe(workload.model, workload.name, most_rows=LEAST_ROWS)  # more only where there is memory
            whole = _arguments_of(self._pass_of(None, use_cache=not self.uses_cache))
            seen.begin(session, workload)
            layout = probe.layout(whole)
            micro_batches = [layout.take(whole, start, stop) for start, stop in row_ranges(layout.rows, parts)]
            probe.weights(whole, layout, micro_batches)
            self._layout = layout
            return seen.finish(session)

    @functools.cached_property
    def _layout(self) -> Layout:
        with self._session(Plan()) as (_, seen):
            seen.recorder.start()
            return Probe(seen.workload.model, seen.workload.name).layout(_arguments_of(seen.workload))

    # -- parts ---------------------------------------------------------------------------------

    def _step(self, session: Session, seen: _StepObserver) -> Trace:
        workload = seen.workload
        seen.begin(session, workload, state_of(workload.optimizers))
        loss = self._backward(workload, seen)
        self._update(seen)
        trace = seen.finish(session)
        del loss
        for optimizer in workload.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return trace

    def _backward(self, workload: Workload, seen: _StepObserver) -> torch.Tensor:
        """Forward and backward; returns the loss, which a loop holds until its step is over."""
        output = output_of(workload)
        seen.outputs[:] = seen.recorder.numbers_of(_large(output))
        try:
            loss = loss_in(workload, output)
        except WorkloadError:
            loss = _surrogate_loss(workload, output)
            seen.note(_NO_LOSS)
        del output
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def _update(self, seen: _StepObserver) -> None:
        for optimizer in seen.workload.optimizers:
            optimizer.step()
        seen.recorder.know([*state_of(seen.workload.optimizers), *parameters_of(seen.workload.model)])

    @contextmanager
    def _session(self, plan: Plan, before: Iterable[Holding] | None = None) -> Iterator[tuple[Session, _StepObserver]]:
        with self._sessions(plan, before) as all_of_them:
            yield all_of_them[0]

    @contextmanager
    def _sessions(
        self, plan: Plan, before: Iterable[Holding] | None = None, *, is_known: bool = True
    ) -> Iterator[list[tuple[Session, _StepObserver]]]:
        """A session on each twin that is being recorded; everything is put back afterwards.

        With `before`, what lives then, the applying of the plan is recorded, too. Steps that are not `is_known` are those of
        a loop that a technique has to look at, and not memlab's own.
        """
        models = [twin.workload.model for twin in self.twins]
        live = (tensor for each in self._live for _, tensor in parameters_of(each.model))
        recorder = Recorder(self._fakes, live, self._choices.inside)
        gradients = [GradientsBefore(each.model.parameters()) for each in self._live]
        # globals, closures and classes that the twin's forward reaches are the user's
        reached = [State.of_model(model, torch.device("cpu")) for model in models]
        try:
            known = own_steps() if is_known else nullcontext()
            reruns = reruns_told_to(recorder.price_rerun)
            told = rounds_told_to(recorder.rounds)
            beside = passing_by(each.model for each in self._live)
            with _undisturbed(), self._choices.entered(), known, reruns, told, beside, ExitStack() as stack:
                for model in models:
                    _watch(model, recorder, stack)
                way_back: list[torch.Tensor] = []  # what a change of a live plan keeps until it has succeeded
                if before is not None:
                    lived = [*before]
                    recorder.begin(lived)
                    recorder.start()
                    way_back += [tensor.detach() for _, tensor in lived]
                    del lived
                found = []
                for twin in self.twins:
                    session = stack.enter_context(fit(twin.workload, plan))
                    twin.workload.model.train()
                    seen = _StepObserver(recorder, twin.workload, list(twin.notes))
                    session.observers.only([seen])
                    found.append((session, seen))
                way_back.clear()
                yield found
                recorder.stop()
                for twin in self.twins:
                    twin.forget()  # what nobody reads again is not turned back by techniques that leave
        except MemlabError:
            raise
        except Exception as error:
            # a step may need values in ways no operator shows: `tensor.numpy()`, a check of the loss's arguments
            raise TraceError(
                f"this step does not run on tensors without values ({type(error).__name__}: {error}); "
                f"measure the plan instead: measure(workload, plan)"
            ) from error
        finally:
            recorder.close()
            for state in reached:
                state.restore()
            for twin in self.twins:
                twin.forget()
            if any(each.are_changed() for each in gradients):
                raise TraceError(
                    "the loss function refers to the live model: a prediction would write to its gradients; hand the "
                    "loss over as a function of output and target, loss_fn=…"
                )


class _StepObserver(LedgerObserver):
    """Record of a step; an observer of the session that tells the recorder what runs."""

    def __init__(self, recorder: Recorder, workload: Workload, notes: list[str]) -> None:
        super().__init__(workload.model, recorder)
        self.recorder = recorder
        self.workload = workload
        self.notes = notes
        self.outputs: list[int] = []
        self.samples = self.tokens = 0
        self.first_call: Callable[[], None] | None = None  # called when the first call of a step begins
        self.until_update = 0  # number of births and deaths before the first update
        self.trained: frozenset[int] = frozenset()  # numbers of the parameters that have a gradient then

    def begin(self, session: Session, workload: Workload, state: Iterable[Holding] = ()) -> None:
        """Begin with what lives when the model is called."""
        self.recorder.begin([*parameters_of(workload.model), *_held(session), *state, *inputs_of(call_of(workload))])
        self.start()

    def start(self) -> None:
        self.samples = self.tokens = self.until_update = 0
        self.outputs.clear()
        self.recorder.start()

    def finish(self, session: Session, trained: frozenset[int] = frozenset()) -> Trace:
        self.recorder.stop()
        return Trace(
            self.recorder.finish(),
            tuple(self.recorder.priced),
            tuple(self.recorder.hidden),
            self.samples,
            self.tokens,
            session.host_bytes,
            (*self.notes, *session.notes),
            tuple(self.outputs),
            trained,
            dict(self.recorder.products),
        )

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def forward_begins(self, batch: Batch) -> None:
        if self.first_call is not None:
            self.first_call()
        super().forward_begins(batch)
        self.samples += batch.rows
        self.tokens += batch.tokens

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        super().step_begins(optimizer)
        if not self.until_update:
            self.until_update = self.recorder.events
            parameters = enumerate(self.workload.model.parameters())
            self.trained = frozenset(number for number, parameter in parameters if parameter.grad is not None)


def _watch(model: nn.Module, recorder: Recorder, undo: ExitStack) -> None:
    """Let the recorder know when the model's own forward runs, below all techniques."""
    original: Callable[..., Any] = model.forward

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with recorder.model_runs():
            return original(*args, **kwargs)

    stand_in(model, "forward", watched, undo)


def _kept(seen: _StepObserver, *, with_graph: bool) -> int:
    """Live bytes after a forward whose output is held."""
    recorder, workload = seen.recorder, seen.workload
    recorder.begin([*parameters_of(workload.model), *inputs_of(call_of(workload))])
    with recorder, torch.set_grad_enabled(with_graph):
        output = output_of(workload)
    live_bytes = recorder.live_bytes
    del output
    return live_bytes


def _before_update(trace: Trace, seen: _StepObserver) -> Trace:
    """Return the part of a step that comes before its first update."""
    until = seen.until_update
    return replace(
        trace,
        observation=replace(trace.observation, raw=trace.observation.raw[:until]),
        priced=tuple(each for each in trace.priced if each.event < until),
        hidden=tuple(each for each in trace.hidden if each.event < until),
        trained=seen.trained,
    )


def _learn_from_calls(session: Session) -> bool:
    return any(each.learns_from_calls for each in brought(session.techniques, SeenInCalls))


def _held(session: Session) -> Iterator[Holding]:
    return ((Category.PARAMETERS, tensor) for tensor in session.in_force.held_tensors)


def _arguments_of(workload: Workload) -> Call:
    batch = call_of(workload)
    return Call.of(batch.args, batch.kwargs)


def _large(output: Any) -> list[torch.Tensor]:
    """Tensors in an output, of a cache among them, that are computed, or held to be cast, and not scalars."""
    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor)]
    tensors = [t.made_of if isinstance(t, LazyTensor) and t.made_of is not None else t for t in leaves]
    return [t for t in tensors if not isinstance(t, LazyTensor) and not (t.numel() == 1 and t.dim() <= 1)]


def _surrogate_loss(workload: Workload, output: Any) -> torch.Tensor:
    """A scalar that depends on every output of the model, computed with next to no memory."""
    floats = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    if not floats:
        raise WorkloadError(
            f"{workload.name} returns nothing that depends on its parameters: there is nothing to train"
        )
    total: torch.Tensor = sum(t.float().mean() if t.dtype is not torch.float32 else t.mean() for t in floats)  # type: ignore[assignment]
    return total


@contextmanager
def without_collections() -> Iterator[None]:
    """Have no garbage collected: a collection walks through all objects of the process, and traces make many."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Random numbers as they were, and no collection in the middle: deaths then come in the same order every time.

    What fails is said in memlab's own words: torch would log a traceback before it.
    """
    state, was_quiet = random.getstate(), _log_of_fakes.disabled
    _log_of_fakes.disabled = True
    try:
        # the twin is on the CPU, and so is what its code makes on the default device
        is_elsewhere = torch.get_default_device().type != "cpu"
        with (
            without_collections(),
            torch.random.fork_rng(devices=[]),
            of_cpu_alone(),
            without_global_hooks(),
            torch.device("cpu") if is_elsewhere else nullcontext(),
        ):
            yield
    finally:
        random.setstate(state)
        _log_of_fakes.disabled = was_quiet
