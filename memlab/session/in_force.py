"""`InForce`: which techniques are in force on a workload, and changing that as a whole.

Rules of a change:

1. Whatever may refuse is asked first, before anything is touched.
2. What the change can touch is remembered by reference (`memlab.session.rollback`). Whatever raises on the way, the
   references go back: the old plan is then in force as it was, down to the moments of the optimizer,
   the loss scale and the hooks. Nothing is converted back, so going back needs no memory. On a twin, which has no values,
   what came in is taken out again instead: remembering is a good part of what a prediction costs.
3. References keep the old form alive until the new one is complete. Where there is no room for both, the
   change is made a second time, and what has been replaced leaves the device as it goes.
4. What references cannot keep is let go of last (`Technique.close`): an engine of a library, when the change has succeeded or
   failed; functions of torch's that a technique listens to, where it does not come in after all.
5. What was replaced leaves holes in the segments of a GPU's allocator, and segments that fit nothing else. Those that are
   empty go back to the driver, so that memory reserved is what the new plan needs.
6. A technique because of which there are other modules and parameters (`Traits.comes_first`) is put in before all others. These
   look at modules and parameters when they come, so they are put in anew when it comes or goes.
7. Ctrl-C is held back (`memlab.runtime.interrupts`). It takes back a change it comes into the middle of, but never
   one that gives the workload back; that one is completed first.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memlab.errors import RefusalError
from memlab.plan import Plan
from memlab.runtime import accelerator, state_entries, state_layers
from memlab.runtime.dropped_graphs import free_dropped_graphs
from memlab.runtime.homes import home_of
from memlab.runtime.hooks import is_compiled
from memlab.runtime.interrupts import Interrupts, deferred_interrupts
from memlab.runtime.mechanisms import AsWritten, ChangedParameters, ModulesBeside, OwnMemory, StateForm, Turns, brought
from memlab.runtime.out_of_memory import is_out_of_memory, release
from memlab.runtime.undo import Undo
from memlab.runtime.workload import Workload
from memlab.session.rollback import Rollback
from memlab.techniques import TECHNIQUES, Technique, is_wanted
from memlab.techniques.base import Host

Optimizer = torch.optim.Optimizer


@dataclass
class _Entry:
    """A technique in force and what takes it out again, in the order in which it was put in."""

    technique: Technique
    undos: list[Callable[[], Any]] = field(default_factory=list)


def check_all(
    coming: Sequence[Technique],
    workload: Workload,
    optimizers: Sequence[Optimizer],
) -> None:
    """Ask techniques whether they apply."""
    for technique in coming:
        if technique.traits.needs_uncompiled and is_compiled(workload.model):
            raise RefusalError(
                technique.field,
                f"{workload.name} is compiled, and compiled code does not look into its modules again",
                "put the plan on the model before torch.compile, or train it uncompiled",
            )
        technique.check(workload)
        for optimizer in optimizers:
            technique.check_optimizer(optimizer)


class InForce:
    """The techniques in force on a workload."""

    def __init__(self, workload: Workload, host: Host | None = None) -> None:
        self.plan = Plan()  # the plan in force
        self.host = host or Host()
        self.host.techniques = lambda: self.techniques
        self.host.aliases = lambda: self._aliases
        self.host.coming = lambda: self._next
        self._next = Plan()  # the plan that a change is about to bring
        self._aliases = 0  # of each weight: what a change that fails goes back to
        self.techniques: list[Technique] = []  # those in force, in the order of `TECHNIQUES`
        self.is_engine = False  # whether one of them is an engine
        self._changes_state = False  # whether one of them keeps optimizer state in another form
        self.optimizers: list[Optimizer] = []  # those the techniques are attached to
        self._workload = workload
        self._entries: dict[type[Technique], _Entry] = {}
        self._exchanged: Callable[[], None] = _nothing
        self._in_call: set[int] = set()  # threads

    def change(self, plan: Plan, *, to_the_end: bool = False) -> None:
        """Put another plan in force: wholly, or not at all; after an error the old one is.

        A Ctrl-C that comes into the middle takes the change back; with `to_the_end` it is delivered when that is complete.
        """
        coming = self._coming(plan)
        free_dropped_graphs()
        check_all(coming, self._workload, self.optimizers)
        if not coming and not any(self._leaves(kind, plan) for kind in self._entries):
            self._follow(plan)
            return
        lasting = plan.lasting
        once = [kind for kind in TECHNIQUES if self._wants(kind, plan) and not kind.wanted(lasting)]
        state_entries.note_held(self.optimizers)
        before, is_on_gpu = self.techniques, any(map(_is_on_gpu, self._workload.model.parameters()))
        with deferred_interrupts() as interrupts:
            self._wholly(partial(self._exchange, plan), None if to_the_end else interrupts)
            done = {self._entries.pop(kind).technique for kind in once}
            self.techniques = [technique for technique in self.techniques if technique not in done]
            self._follow(lasting)
            if is_on_gpu and self.techniques != before:
                accelerator.empty_cache()
                accelerator.empty_host_cache()  # pinned memory, which nobody else on the machine can have meanwhile

    def _follow(self, plan: Plan) -> None:
        """Have the plan in force, and techniques that stay know of it: what they do beside others may depend on these."""
        self.plan = plan
        for technique in self.techniques:
            technique.plan = plan
        if not (self._changes_state or self.host.is_led()):
            state_entries.forget_held(self.optimizers)

    @property
    def held_tensors(self) -> tuple[torch.Tensor, ...]:
        """Parts of parameters that the techniques keep on the device, beside the model."""
        return tuple(tensor for each in brought(self.techniques, OwnMemory) for tensor in each.held_tensors)

    def canonical_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype a parameter or buffer of the model has without any plan."""
        changed = (each.canonical_dtype(tensor) for each in brought(self.techniques, ChangedParameters))
        return next((dtype for dtype in changed if dtype is not tensor.dtype), tensor.dtype)

    def as_written(self) -> AsWritten | None:
        """Return what model and optimizers have without the plan, where other modules and parameters are in its place."""
        changed = brought(self.techniques, ChangedParameters)
        return next((found for each in changed if (found := each.as_written()) is not None), None)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        for technique in self.techniques:
            technique.check_optimizer(optimizer)

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Put the techniques in force on one more optimizer: all of them, or none."""
        with deferred_interrupts():
            self.optimizers.append(optimizer)
            if not self._entries:
                return
            try:
                self._wholly(partial(self._extend, optimizer), None)
            except BaseException:
                self.detach_optimizer(optimizer)
                raise

    def detach_optimizer(self, optimizer: Optimizer) -> None:
        """Forget an optimizer that no technique is on any more; harmless when done."""
        self.optimizers = [other for other in self.optimizers if other is not optimizer]

    # -- whose turn it is ----------------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """Tell the techniques that the loop calls the model, and when it goes on; a call within a call is part of it."""
        thread = threading.get_ident()
        is_within = thread in self._in_call
        try:
            self._in_call.add(thread)
            for each in brought(self.techniques, Turns):
                each.taken_over()
            yield
        finally:
            if not is_within:
                self._in_call.discard(thread)
                self._hand_back()

    def _hand_back(self) -> None:
        # a plan may change within a call, and for another thread the loop may still be in one
        for each in brought(() if self._in_call else self.techniques, Turns):
            each.handed_back()

    # -- all or nothing ------------------------------------------------------------------------

    def _wholly(self, act: Callable[[], None], interrupts: Interrupts | None) -> None:
        try:
            for each in brought(self.techniques, Turns):
                each.taken_over()
            self._once_or_twice(act, interrupts)
        except BaseException:
            self._hand_back()  # to those that are in force as before
            raise

    def _once_or_twice(self, act: Callable[[], None], interrupts: Interrupts | None) -> None:
        try:
            self._once(act, interrupts, sparing=False)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            return
        # the error is gone, and with it what it held
        gc.collect()
        self._once(act, interrupts, sparing=True)

    def _once(self, act: Callable[[], None], interrupts: Interrupts | None, *, sparing: bool) -> None:
        before: Rollback | None = None
        if self._workload.has_values:
            beside = [each for kind in brought(self.techniques, ModulesBeside) for each in kind.beside]
            owned = [*self._entries.values(), *(kept for _, kept in beside)]
            before = Rollback(self._workload.model, self.optimizers, owned, [module for module, _ in beside])
        self._aliases = 1
        entries, plan = dict(self._entries), self.plan
        # an engine keeps what it shows, so sending that away would free nothing, and it would not be the engine's again
        spares = sparing and not self.is_engine
        self._exchanged = before.spare if before is not None and spares else _nothing
        try:
            act()
            self._hand_back()
            if interrupts is not None:
                interrupts.deliver()
        except BaseException as error:
            release(error)  # its frames would seem to be the loop, which holds gradients and weights
            if before is None:
                self._take_back(entries, plan)
                raise
            tried, self._entries, self.plan = self._entries, entries, plan
            self._refresh()
            before.restore()
            state_entries.restored(self.optimizers)
            _close([entry for kind, entry in tried.items() if entries.get(kind) is not entry])
            del before, tried, entries
            raise
        else:
            left = [entry for kind, entry in entries.items() if self._entries.get(kind) is not entry]
            _close([entry for entry in left if entry.technique.traits.is_engine])
        finally:
            self._exchanged = _nothing
            self._aliases = 0

    def _take_back(self, entries: Mapping[type[Technique], _Entry], plan: Plan) -> None:
        """Take out what a change that failed has put in; there are no values that its undo could lose."""
        for kind in reversed(TECHNIQUES):
            if kind in self._entries and entries.get(kind) is not self._entries[kind]:
                technique = self._entries[kind].technique
                self._take_out(kind)
                technique.close()
        self.plan = plan

    def _refresh(self) -> None:
        self.techniques = [self._entries[kind].technique for kind in TECHNIQUES if kind in self._entries]
        self.is_engine = any(technique.traits.is_engine for technique in self.techniques)
        self._changes_state = bool(brought(self.techniques, StateForm))

    # -- in and out ----------------------------------------------------------------------------

    def _exchange(self, plan: Plan) -> None:
        self._next, coming = plan, self._coming(plan)
        for kind in reversed(TECHNIQUES):
            if self._leaves(kind, plan):
                self._take_out(kind)
        for technique in coming:
            self._put_in(technique)
        self.plan = plan

    def _coming(self, plan: Plan) -> list[Technique]:
        kinds = [kind for kind in TECHNIQUES if self._wants(kind, plan)]
        coming = [kind(plan) for kind in kinds if kind not in self._entries or self._leaves(kind, plan)]
        for technique in coming:
            technique.host = self.host
        return coming

    def _wants(self, kind: type[Technique], plan: Plan) -> bool:
        return is_wanted(kind, plan) and not (kind.traits.is_of_optimizer and self.host.is_led())

    def _leaves(self, kind: type[Technique], plan: Plan) -> bool:
        return kind in self._entries and (self._is_replaced(kind, plan) or self._parameters_change(plan))

    def _parameters_change(self, plan: Plan) -> bool:
        """Return whether the other techniques have to look anew at what there is."""
        first = (kind for kind in TECHNIQUES if kind.traits.comes_first)
        return any(
            self._is_replaced(kind, plan) if kind in self._entries else self._wants(kind, plan) for kind in first
        )

    def _is_replaced(self, kind: type[Technique], plan: Plan) -> bool:
        return not self._wants(kind, plan) or kind.setting(plan) != kind.setting(self._entries[kind].technique.plan)

    def _put_in(self, technique: Technique) -> None:
        entry = self._entries[type(technique)] = _Entry(technique)
        self._refresh()
        undo = self._undo_of(entry)
        technique.attach_model(self._workload, undo)
        self._exchanged()
        for optimizer in self.optimizers:
            self._attach(entry, optimizer)

    def _take_out(self, kind: type[Technique]) -> None:
        for undo in reversed(self._entries[kind].undos):
            undo()
            self._exchanged()
        del self._entries[kind]
        self._refresh()

    def _extend(self, optimizer: Optimizer) -> None:
        for technique in self.techniques:
            self._attach(self._entries[type(technique)], optimizer)

    def _attach(self, entry: _Entry, optimizer: Optimizer) -> None:
        technique = entry.technique
        undo = self._undo_of(entry)
        technique.attach_optimizer(optimizer, undo)
        for form in brought([technique], StateForm):
            undo.callback(self._remove_layer, optimizer, technique, form)
            state_layers.apply_layer(optimizer, form, self._above(technique), self._exchanged, self.techniques)

    def _undo_of(self, entry: _Entry) -> Undo:
        undo = Undo(self._exchanged)
        undo.calls = entry.undos
        return undo

    def _remove_layer(self, optimizer: Optimizer, technique: Technique, form: StateForm) -> None:
        state_layers.remove_layer(optimizer, form, self._above(technique), self._exchanged, self.techniques)

    def _above(self, technique: Technique) -> Sequence[StateForm]:
        place = TECHNIQUES.index(type(technique))
        return brought([other for other in self.techniques if TECHNIQUES.index(type(other)) > place], StateForm)


def _close(entries: Iterable[_Entry]) -> None:
    for entry in entries:
        entry.technique.close()


def _is_on_gpu(parameter: torch.Tensor) -> bool:
    # a twin of a prediction stands for a GPU, and has nothing there
    return accelerator.is_accelerator(home_of(parameter)) and not isinstance(parameter, FakeTensor)


def _nothing() -> None:
    pass
