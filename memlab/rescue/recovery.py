"""`Recovery`: the same work again under plans that need less memory, until it fits or nothing is left to try."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch

from memlab.errors import MemlabError, RefusalError, first_line
from memlab.plan import Plan, Precision
from memlab.plan.space import half_format
from memlab.records import Prediction, Rescue
from memlab.rescue.fallback import Fallback, Place, next_plans
from memlab.rescue.machine import held_by_others, room_elsewhere
from memlab.rescue.nothing_fits import Attempt, nothing_fits
from memlab.rescue.update import BrokenUpdateError
from memlab.runtime.accelerator import compute_capability
from memlab.runtime.fingerprints import CHANGED
from memlab.runtime.mechanisms import SeenInCalls, brought
from memlab.runtime.out_of_memory import collect, is_out_of_memory, release, requested_bytes

if TYPE_CHECKING:
    from memlab.session import Session

_T = TypeVar("_T")


class NothingFitsError(MemlabError, torch.OutOfMemoryError):
    """Memory ran out, and no plan to fall back on needs little enough.

    It is a `torch.OutOfMemoryError`, so that code which handles one handles this.
    """


class OtherResultsError(NothingFitsError):
    """Memory ran out in a backward pass, and the forward pass of its call cannot be run again as it was."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The backward pass ran out of memory. {name} computed something else when it ran again: {CHANGED}; "
            "leave the change until after backward(), or begin with a plan that fits (%memfit predict shows some)"
        )


class _Trouble:
    """Memory has run out, and the same work is being tried again."""

    def __init__(self, step: int, plan: Plan, began: float) -> None:
        self.step = step
        self.plan = plan
        self.attempts: list[Attempt] = []
        self.base = plan  # the last plan that applied, and ran out of memory
        self.refused: set[Plan] = set()  # plans that do not apply, or that there was no room to change to
        self.no_room: list[Plan] = []  # the latter
        self.left_out: set[str] = set()  # fields that turned out not to apply, or that there was no memory to look at
        self.applied: set[str] = set()  # fields that were seen to apply
        self.fallback: Fallback | None = None
        self.tried_again: Plan | None = None  # with what had been freed, before numbers would change
        # once the first one is to come that changes numbers: the base with all settings, and what was left out of it
        self.whole: tuple[Plan, set[str]] | None = None
        self.may_change_numbers = False
        # whether an update has rounded moments on the way; else they are as they were, once another plan is in force
        self.has_rounded = False
        self.is_last_try = False
        self.refusal: RefusalError | None = None  # of a plan that was tried
        self.began = began
        self.room_made = began

    @property
    def is_trying(self) -> bool:
        """Return whether a fallback is in force."""
        return self.fallback is not None


class Recovery:
    """Work of one session's loop that memory ran out for."""

    def __init__(
        self,
        session: Callable[[], Session],
        follow: Callable[[], None],  # called when a plan has changed, and parameters may have left the device
        drop_graphs: Callable[[], bool],  # drops graphs that can be made again, of all models; whether there were any
        keep: Collection[str],  # names of plan fields that must not change
        # of plans for this workload and device; order the fallbacks where they are known
        predictions: Mapping[Plan, Prediction] | None,
        capacity_bytes: int | None,  # size of the device, to tell which predictions fit; None when unknown
        say: Callable[[str], None] | None,  # told in words about each rescue, when it has succeeded
    ) -> None:
        self._session = session
        self._follow = follow
        self._drop_graphs = drop_graphs
        self._keep = frozenset(keep)
        self._predictions = dict(predictions or {})
        self._capacity_bytes = capacity_bytes
        self._say = say
        self.rescues: list[Rescue] = []  # what was rescued, in order
        self.rows = 1  # of the batch that is worked on
        self.is_in_step = False  # whether an optimizer is running a step of its own, closure and all
        self._has_named_others = False  # that hold memory of the device
        self._trouble: _Trouble | None = None
        self._work_began = perf_counter()

    def work_begins(self) -> None:
        """Count the time that a rescue takes from here, if one comes."""
        self._work_began = perf_counter()

    def until_it_fits(self, work: Callable[[], _T], make_room: Callable[[BaseException], None]) -> _T:
        """Do something again, as if never tried, under other plans, until memory suffices; errors no longer hold anything when room is made."""
        while True:
            oom: BaseException | None = None
            try:
                done = work()
            except BrokenUpdateError:
                self._trouble = None
                raise
            except BaseException as error:
                if not self.can_rescue(error):
                    raise
                oom = error
            if oom is None:
                self.settle()
                return done
            make_room(oom)

    def can_rescue(self, error: BaseException) -> bool:
        """Return whether memory ran out, or a plan that was tried against that does not apply.

        If neither, the error is the loop's, and the attempts before it are forgotten.
        """
        is_refused = isinstance(error, RefusalError) and self._trouble is not None and self._trouble.is_trying
        if is_refused or (is_out_of_memory(error) and not isinstance(error, NothingFitsError)):
            return True
        self._trouble = None
        return False

    def as_refusal(self, error: BaseException) -> BaseException:
        """Return the refusal that an error stands for, of code that runs in 16 bits only because memory ran out; else the error.

        Where the code is to blame, its error comes again under the plan before.
        """
        session, trouble = self._session(), self._trouble
        is_of_code = isinstance(error, RuntimeError) and not (isinstance(error, MemlabError) or is_out_of_memory(error))
        precision = session.plan.precision
        if not is_of_code or precision not in (Precision.BF16, Precision.FP16):
            return error
        if trouble is not None and trouble.plan.precision is precision:
            return error
        refusal = RefusalError("precision", f"{session.workload.name} does not run in 16 bits: {first_line(error)}")
        refusal.__cause__ = error
        return refusal

    def falls_back(self, error: BaseException) -> bool:
        """Return whether the plan on trial does not apply, and the one before is in force again for the same work."""
        is_back = self._session().switching.falls_back(error)
        if is_back:
            self._follow()
        return is_back

    def make_room(
        self,
        error: BaseException,
        place: Place,
        start_over: Callable[[], None] = lambda: None,
        *,
        keeps_rows: bool = False,
        is_as_before: bool = True,
    ) -> None:
        """Bring the next plan into force. Raises `NothingFitsError`: there is none."""
        trouble = self._trouble
        if trouble is not None and isinstance(error, RefusalError):
            trouble.refused.add(self._session().plan)
            trouble.refusal = error
            self._session().observers.tell("refusal_handled")
        else:
            trouble = self._begin_trouble(place, error)
        release(error)
        start_over()
        collect()
        is_room = self._finds_room(trouble, place, keeps_rows=keeps_rows)
        if not is_room and not (self._is_base_in_force(trouble) and self._companions_come()):
            if trouble.is_last_try:
                if trouble.refusal is not None and self.falls_back(trouble.refusal):
                    self._trouble = None  # the plan of an earlier rescue may be what does not apply
                    return
                is_as_before = is_as_before and not self.is_in_step
                self._give_up(trouble, keeps_rows=keeps_rows, is_as_before=is_as_before)
            # nothing is left but what has just been freed: the same plan once more
            trouble.is_last_try = True
            self._drop_graphs()
        trouble.room_made = perf_counter()

    def free(self, place: Place, error: BaseException) -> None:
        """Drop what an error holds; the plan stays."""
        trouble = self._begin_trouble(place, error)
        release(error)
        collect()
        trouble.room_made = perf_counter()

    def _begin_trouble(self, place: Place, error: BaseException) -> _Trouble:
        session = self._session()
        if self._trouble is None:
            self._trouble = _Trouble(session.steps + 1, session.plan, self._work_began)
        trouble = self._trouble
        trouble.base = session.plan
        trouble.applied |= {
            technique.field
            for technique in session.techniques
            if all(each.applies for each in brought([technique], SeenInCalls))
        }
        trouble.attempts.append(Attempt(trouble.step, place, session.plan, str(error), requested_bytes(error)))
        if (others := held_by_others(str(error))) and not self._has_named_others:
            self._has_named_others = True
            session.log.note(f"memory ran out: {others}", step=trouble.step)
        return trouble

    def _finds_room(self, trouble: _Trouble, place: Place, *, keeps_rows: bool) -> bool:
        """Change to the next plan to try; those that change numbers are tried after all exact ones."""
        fall_back = partial(self._fall_back, trouble, place, keeps_rows=keeps_rows)
        if not trouble.may_change_numbers:
            if fall_back():
                return True
            trouble.whole = trouble.whole or (trouble.base, {*trouble.left_out})
            if self._leaves_out(trouble) and fall_back():
                return True
            trouble.may_change_numbers = True
            trouble.base, trouble.left_out = trouble.whole
        return fall_back() or (self._leaves_out(trouble) and fall_back())

    def _fall_back(self, trouble: _Trouble, place: Place, *, keeps_rows: bool) -> bool:
        """Change to the first fallback that applies, or try once more before numbers would change; whether there is one."""
        while (fallback := next(self._fallbacks(trouble, place, keeps_rows=keeps_rows), None)) is not None:
            if fallback.lossy and not trouble.may_change_numbers:
                return False
            if fallback.lossy and trouble.tried_again != trouble.base:
                trouble.tried_again = trouble.base  # what has just been freed may be enough, or what others hold
                self._drop_graphs()
                if self._is_base_in_force(trouble):
                    return True
            trouble.fallback = fallback
            if self._changes_to(fallback.plan):
                return True
            trouble.refused.add(fallback.plan)
        return False

    def _leaves_out(self, trouble: _Trouble) -> bool:
        """Begin again without a setting of the last plan that ran out; False where none stands in the way.

        One does that was refused once there was memory to look whether it applies, or that there never was memory to look at.
        """
        changes = set(trouble.base.changes(trouble.plan)) - trouble.left_out
        refused = {trouble.refusal.technique} if trouble.refusal is not None else set()
        in_the_way = (changes & refused) or changes - trouble.applied
        if in_the_way:
            trouble.left_out |= in_the_way
            trouble.base = trouble.plan
        return bool(in_the_way)

    def _is_base_in_force(self, trouble: _Trouble) -> bool:
        """Return whether the last plan that applied is in force, or comes back after one that was refused."""
        return self._session().plan == trouble.base or self._changes_to(trouble.base)

    def _changes_to(self, plan: Plan) -> bool:
        """Put a plan in force; False where it does not apply, or there is no room to change to it."""
        session, trouble = self._session(), self._trouble
        if trouble is not None and "optimizer" in plan.numerics_from(trouble.plan):
            trouble.has_rounded |= self.is_in_step
        try:
            session.switching.change(plan, noted=False, of_rescue=True)
        except (RefusalError, MemoryError, RuntimeError) as error:
            if not (isinstance(error, RefusalError) or is_out_of_memory(error)):
                raise
            if trouble is not None and is_out_of_memory(error):
                trouble.no_room.append(plan)
            release(error)
            return False
        self._follow()
        return True

    def _companions_come(self) -> bool:
        """Have the other models of the loop take this one's plan there and then; whether one has."""
        session, came = self._session(), False
        for each in session.companions:
            before = each.plan
            with suppress(RefusalError, torch.OutOfMemoryError):
                each.switching.change(session.plan, of_rescue=True)
            came |= each.plan != before
        return came

    def _fallbacks(self, trouble: _Trouble, place: Place, *, keeps_rows: bool) -> Iterator[Fallback]:
        return next_plans(
            trouble.base,
            place,
            rows=self.rows,
            keep=self._keep | trouble.left_out,
            keeps_rows=keeps_rows,
            has_optimizer=bool(self._session().workload.optimizers),
            refused=trouble.refused | self._session().switching.refused,
            predictions=self._predictions,
            budget_bytes=self._capacity_bytes,
            half=half_of(self._session().workload.device),
        )

    def _give_up(self, trouble: _Trouble, *, keeps_rows: bool, is_as_before: bool) -> NoReturn:
        self._trouble = None
        session = self._session()
        self._go_back(trouble)
        text = nothing_fits(
            trouble.attempts,
            trouble.no_room,
            capacity_bytes=self._capacity_bytes,
            predictions=self._predictions,
            keep=self._keep,
            rows=self.rows,
            keeps_rows=keeps_rows,
            has_optimizer=bool(session.workload.optimizers),
            is_as_before=is_as_before,
            elsewhere=room_elsewhere(session.workload.device),
        )
        if session.plan != trouble.plan:
            no_room = f"no room to go back to {trouble.plan.label}"
            session.log.note(f"memory ran out, and there is {no_room}: {session.plan.label}", step=trouble.step)
            text += f" There is {no_room}: {session.plan.label} stays in force until %memfit undo."
        raise NothingFitsError(text) from None

    def _go_back(self, trouble: _Trouble) -> None:
        """Put the plan before in force; where there is no room for it, the last one tried with its number formats."""
        tried = dict.fromkeys(attempt.plan for attempt in reversed(trouble.attempts))
        alike = [plan for plan in tried if plan.has_numbers_of(trouble.plan)]
        for plan in (trouble.plan, *alike):
            if self._changes_to(plan):
                return
            collect()

    def forget(self) -> None:
        """Attempts so far are over, and the error is the loop's: the plan is the one before again."""
        trouble, self._trouble = self._trouble, None
        if trouble is not None and self._session().plan != trouble.plan:
            self._go_back(trouble)

    def settle(self, how: str = "") -> None:
        """The work that was in trouble is done: note how, beside the plan."""
        trouble, self._trouble = self._trouble, None
        if trouble is None:
            return
        session = self._session()
        first = trouble.attempts[0]
        rescue = Rescue(
            step=trouble.step,
            place=first.place.words,
            before=trouble.plan.label,
            after=", ".join(filter(None, (session.plan.label if session.plan != trouble.plan or not how else "", how))),
            error=first.error,
            attempts=len(trouble.attempts),
            seconds=trouble.room_made - trouble.began,
            numerics=tuple(
                dict.fromkeys([*session.plan.numerics_from(trouble.plan), *["optimizer"] * trouble.has_rounded])
            ),
        )
        self.rescues.append(rescue)
        session.log.note(rescue.text, step=rescue.step)
        if session.plan != trouble.plan:
            session.switching.rescued(trouble.plan)
            for each in session.companions:
                each.switching.ask(session.plan)
        if self._say is not None:
            self._say(str(rescue))


def half_of(device: torch.device) -> Precision:
    """Return the 16-bit format that a device computes in."""
    return half_format(compute_capability(device))
