"""`PlanField` and `Saving`: what is known of a setting, and nowhere else.

The flags of the magics, their help, the controls of a panel and the text a plan prints as follow from it, and so does what
predictions, searches, engines and inference ask about a setting.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from memlab.errors import PlanError

if TYPE_CHECKING:
    from memlab.plan.plan import Plan
    from memlab.plan.settings.offload import Offloaded
    from memlab.plan.settings.precision import Precision

_E = TypeVar("_E", bound=StrEnum)


def _none(_plan: Plan) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True, eq=False)
class PlanField:
    """One field of a plan as people see it."""

    name: str  # attribute of `Plan`
    flag: str  # the magic flag that sets it
    metavar: str  # how its values read in help
    help: str  # one sentence for help, panel and docs
    parse: Callable[[str], Any]  # text of the flag's value to the field's value
    write: Callable[[Any], str] = str  # the field's value to such a text
    bare: str | None = None  # value when the flag is given without one, or None when a value is needed
    shorthands: Mapping[str, str] = field(default_factory=dict)  # flags without a value, and the value each stands for
    choices: tuple[str, ...] = ()  # values offered where one picks instead of typing; the first one is the default
    offer: str = ""  # of the choices, the one a panel offers first
    title: str = ""  # what it is called where people pick
    # what choices are called there, where their text does not say it
    names: Mapping[str, str] = field(default_factory=dict)
    is_predicted: bool = True  # whether what its settings would give can be predicted
    is_exact: bool = False  # whether all its settings give the gradient and the update of the loop as written
    alike: tuple[Any, ...] = ()  # values with the same numbers, each smaller on the device than the one before
    # whether it concerns the model call alone, so that each model of a shared optimizer can have its own
    is_of_calls: bool = False
    is_beside_engines: bool = False  # whether engines have a way of their own for it
    # whether its settings do the same by degrees, so that half of the error of one is that of another
    is_graded: bool = False
    # by how much more than for others the predicted time may be wrong. What moves data off the device depends on a disk
    # or a bus and on how many pieces there are: on a CPU, activations off it cost steps 0.8 to 4 times what the
    # prediction had for them (`python -m tests.bench.find_plan`)
    doubt: float = 1.0
    # whether one value keeps or raises what another one does; by default the same one, or any over the default
    covers: Callable[[Any, Any], bool] | None = None
    searched: tuple[str, ...] = ()  # values that a search considers
    is_list: bool = False  # whether a value lists settings that are there side by side, as pairs of what and how
    untrained: str = "it works on training only"  # why it means nothing where nothing is trained
    # whether it goes by what the optimizer updates, so that a cell's plan comes when the optimizer is there
    needs_optimizer: bool = False
    # yields an error for each other setting of a plan that its own excludes
    conflicts: Callable[[Plan], Iterator[str]] = _none

    @cached_property
    def default(self) -> Any:
        """The value that changes nothing."""
        return self.parse(self.choices[0])

    @property
    def attribute(self) -> Any:
        """Return what declares it in `Plan`."""
        return field(default=self.default, metadata={"spec": self})

    def contains(self, larger: Any, smaller: Any) -> bool:
        """Return whether one value keeps or raises what another one does."""
        if smaller in (larger, self.default) or (self.covers is not None and self.covers(larger, smaller)):
            return True
        return {larger, smaller} <= {*self.alike} and self.alike.index(larger) > self.alike.index(smaller)

    def parts(self, value: Any) -> tuple[Any, ...]:
        """Return the settings that a value stands for, each as a value of its own."""
        return tuple((pair,) for pair in value) if self.is_list else (value,)

    def joined(self, one: Any, other: Any) -> Any:
        """Return the value with another one added: in its place, or beside what it lists."""
        return tuple((dict(one) | dict(other)).items()) if self.is_list else other

    def is_same(self, one: Any, other: Any) -> bool:
        """Return whether two values compute the same."""
        return one == other or self.is_exact or {one, other} <= {*self.alike}

    def text(self, value: Any) -> str:
        """Text of a value, as `parse` reads it; where it is one of the choices, the choice.

        Example:
            >>> from memlab.plan.settings.offload import OFFLOAD as spec
            >>> spec.text(spec.parse("activations,optimizer")), spec.text(spec.parse("optimizer:disk"))
            ('optimizer,activations', 'optimizer:disk')
        """
        return next((choice for choice in self.choices if self.parse(choice) == value), self.write(value))

    def show(self, value: Any) -> str:
        """The flag that sets a value, the shortest there is; empty for the default."""
        if value == self.default:
            return ""
        shorter = {text: flag for flag, text in self.shorthands.items()} | ({self.bare: self.flag} if self.bare else {})
        text = self.write(value)
        return shorter.get(text, f"{self.flag} {text}")


@dataclass(frozen=True, eq=False)
class Saving:
    """One way to need less memory. Each thing that can be offloaded is one of its own."""

    field: PlanField
    # what a change does, from the value before, the one after and the rows of a batch
    words: Callable[[Any, Any, int], str]
    # usual time of a step under a value, relative to one without: an order, not a prediction
    cost: Callable[[Any], float]
    # the next stronger value, for a batch of so many rows and a device of this 16-bit format; the same value where
    # there is none. None for what is never tried unless somebody asks for it
    stronger: Callable[[Any, int, Precision], Any] | None = None
    measured: tuple[str, ...] = ()  # values that an ablation measures
    what: Offloaded | None = None  # of what is offloaded, the part that it is about
    is_in_update: bool = False  # whether it lowers what the optimizer's update needs
    is_of_optimizer: bool = False  # whether it needs an optimizer
    is_in_evaluation: bool = False  # whether it lowers what calls without gradients need

    def of(self, plan: Plan) -> Any:
        """Return its value in a plan."""
        return getattr(plan, self.field.name) if self.what is None else plan.tier_of(self.what)

    def raised(self, plan: Plan, rows: int, half: Precision) -> Plan | None:
        """The plan with the next stronger setting; None where there is none, or where the others exclude it."""
        if self.stronger is None or (value := self.stronger(self.of(plan), rows, half)) == self.of(plan):
            return None
        change: Any = value if self.what is None else (*getattr(plan, self.field.name), (self.what, value))
        try:
            return replace(plan, **{self.field.name: change})
        except PlanError:
            return None


def count(flag: str, what: str) -> Callable[[str], int]:
    """Return a function that reads a number of 1 or more."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise PlanError(f"{flag} {text}: expected a whole number of {what}, 1 or more, as in '{flag} 4'")
        return int(text)

    return parse


def choice(flag: str, enum: type[_E]) -> Callable[[str], _E]:
    """Return a function that reads a member of an enumeration."""

    def parse(text: str) -> _E:
        try:
            return enum(text)
        except ValueError:
            raise PlanError(f"{flag} {text}: allowed are {', '.join(enum)}{did_you_mean(text, [*enum])}") from None

    return parse


def did_you_mean(given: str, allowed: list[str]) -> str:
    """Return the end of an error that names the closest allowed word; empty where none is close."""
    close = difflib.get_close_matches(given, allowed, n=1)
    return f"; did you mean {close[0]}?" if close else ""
