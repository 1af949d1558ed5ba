"""`Plan`: which memory-saving techniques, with which parameters.

A plan is a frozen value. A new setting is one line in it; what is known of the setting is in a file of `settings`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from memlab.errors import PlanError
from memlab.plan.fields import PlanField, did_you_mean
from memlab.plan.settings.accumulation import ACCUMULATION, BATCHNORM, BatchNorm
from memlab.plan.settings.adapters import ADAPTERS, BASE, Adapters, BaseBits
from memlab.plan.settings.checkpointing import CHECKPOINTING, Checkpointing
from memlab.plan.settings.gradients import GRADIENTS, Gradients
from memlab.plan.settings.loss import LOSS, Loss
from memlab.plan.settings.offload import OFFLOAD, Offload, Offloaded, Tier
from memlab.plan.settings.optimizer import OPTIMIZER, OptimizerChoice
from memlab.plan.settings.padding import PADDING, Padding
from memlab.plan.settings.precision import PRECISION, Precision
from memlab.plan.settings.scale import SCALE, ScaleOut
from memlab.plan.settings.tiling import TILING


@dataclass(frozen=True)
class Plan:
    """Techniques to apply, with their parameters. The defaults change nothing.

    Args:
        accumulation: micro-batches per batch, 1 or more.
        batchnorm: a `BatchNorm`, or its text.
        checkpointing: a `Checkpointing`, or its text: "off", "full", "every:N", "selective" or "budget:SIZE".
        precision: a `Precision`, or its text.
        optimizer: an `OptimizerChoice`, or its text.
        offload: pairs of what and where, or the text of the flag ("optimizer:disk,activations").
        loss: a `Loss`, or its text.
        gradients: a `Gradients`, or its text.
        padding: a `Padding`, or its text.
        tiling: tiles in which large linear layers are computed, 1 or more.
        adapters: an `Adapters`, or its text: "off", "off:merge", "off:drop", or what there is to be ("r=16,alpha=32").
        base: a `BaseBits`, or its text.
        scale: a `ScaleOut`, or its text.

    Raises:
        PlanError: a value that is not allowed, or parts that exclude each other.

    Example:
        >>> plan = Plan.parse("--accumulate 4 --fp16")
        >>> str(plan), plan.precision
        ('--accumulate 4 --fp16', <Precision.FP16: 'fp16'>)
        >>> Plan() == Plan.parse("")
        True
    """

    accumulation: int = ACCUMULATION.attribute
    batchnorm: BatchNorm = BATCHNORM.attribute
    checkpointing: Checkpointing = CHECKPOINTING.attribute
    precision: Precision = PRECISION.attribute
    optimizer: OptimizerChoice = OPTIMIZER.attribute
    offload: Offload = OFFLOAD.attribute
    loss: Loss = LOSS.attribute
    gradients: Gradients = GRADIENTS.attribute
    padding: Padding = PADDING.attribute
    tiling: int = TILING.attribute
    adapters: Adapters = ADAPTERS.attribute
    base: BaseBits = BASE.attribute
    scale: ScaleOut = SCALE.attribute

    def __post_init__(self) -> None:
        for spec in FIELDS:
            value = getattr(self, spec.name)
            if value is not spec.default:
                object.__setattr__(self, spec.name, spec.parse(value if isinstance(value, str) else spec.write(value)))
        for spec in FIELDS:
            for words in spec.conflicts(self):
                raise PlanError(words)

    def __str__(self) -> str:
        return " ".join(flag for spec in FIELDS if (flag := spec.show(getattr(self, spec.name))))

    @property
    def label(self) -> str:
        """The flags, or "as written" when the plan changes nothing."""
        return str(self) or "as written"

    @property
    def lasting(self) -> Plan:
        """The plan that is in force once it has been applied: what is done once is done.

        Example:
            >>> Plan.parse("--lora off:merge --bf16").lasting.label
            '--bf16'
        """
        return self if self.adapters.is_on else replace(self, adapters=Adapters("off"))

    def tier_of(self, what: Offloaded) -> Tier | None:
        """Return where something is offloaded to, or None when it stays."""
        return dict(self.offload).get(what)

    def changed_fields(self, since: Plan | None = None) -> tuple[PlanField, ...]:
        """Fields that differ from the defaults, or from those of another plan."""
        return tuple(
            spec
            for spec in FIELDS
            if getattr(self, spec.name) != (spec.default if since is None else getattr(since, spec.name))
        )

    def changes(self, since: Plan | None = None) -> tuple[str, ...]:
        """Names of the fields that differ from the defaults, or from those of another plan."""
        return tuple(spec.name for spec in self.changed_fields(since))

    def settings(self) -> Iterator[Plan]:
        """Yield plans with one setting each, of those that differ from the defaults.

        Example:
            >>> [plan.label for plan in Plan.parse("--bf16 --offload optimizer,activations").settings()]
            ['--bf16', '--offload activations', '--offload optimizer']
        """
        for spec in self.changed_fields():
            yield from (Plan(**{spec.name: part}) for part in spec.parts(getattr(self, spec.name)))

    def joined(self, other: Plan) -> Plan:
        """Return the plan with the settings of another one; what is off the device already stays off it.

        Raises:
            PlanError: the two exclude each other.

        Example:
            >>> str(Plan.parse("--accumulate 2 --offload optimizer").joined(Plan.parse("--offload activations")))
            '--accumulate 2 --offload activations,optimizer'
            >>> str(Plan.parse("--checkpoint selective").joined(Plan.parse("--checkpoint")))
            '--checkpoint'
        """
        of_both = {spec: (getattr(self, spec.name), getattr(other, spec.name)) for spec in other.changed_fields()}
        return replace(self, **{spec.name: spec.joined(*both) for spec, both in of_both.items()})

    @property
    def is_exact(self) -> bool:
        """Return whether gradients and updates are those of the loop as written."""
        return self.has_numbers_of(Plan())

    def has_numbers_of(self, other: Plan) -> bool:
        """Return whether both compute the same, where one contains the other."""
        return not self.numerics_from(other)

    def numerics_from(self, other: Plan) -> tuple[str, ...]:
        """Names of the fields by which this plan computes other numbers than another one."""
        differing = self.changed_fields(other)
        return tuple(s.name for s in differing if not s.is_same(getattr(self, s.name), getattr(other, s.name)))

    def contains(self, smaller: Plan) -> bool:
        """Return whether this plan keeps every setting of another, or raises it.

        Example:
            >>> Plan.parse("--accumulate 4 --checkpoint").contains(Plan.parse("--checkpoint selective"))
            True
            >>> Plan.parse("--accumulate 4").contains(Plan.parse("--checkpoint selective"))
            False
        """
        return all(spec.contains(getattr(self, spec.name), getattr(smaller, spec.name)) for spec in FIELDS)

    def with_setting(self, name: str, text: str) -> Plan:
        """The same plan with one field set from its text, as a panel does it.

        Example:
            >>> str(Plan().with_setting("checkpointing", "every:2"))
            '--checkpoint every:2'
        """
        if name not in BY_NAME:
            raise PlanError(f"no field {name!r} in a plan; there are {', '.join(BY_NAME)}")
        return replace(self, **{name: BY_NAME[name].parse(text)})

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read a plan from magic flags.

        Args:
            text: flags as on a `%%memfit` line; empty for the plan that changes nothing.

        Raises:
            PlanError: an unknown flag (with the nearest known one), a missing or unknown value, a field
                set twice, or techniques that exclude each other.
        """
        if not isinstance(text, str):
            raise PlanError(f"plan: expected a memlab.Plan or its flags as text, got {type(text).__name__}")
        plan, rest = cls.parse_known(shlex.split(text))
        if rest:
            raise unknown_flag(rest[0])
        return plan

    @classmethod
    def of(cls, given: Plan | str) -> Plan:
        """A plan as it is, or read from its flags; raises what `parse` does."""
        return given if isinstance(given, Plan) else cls.parse(given)

    @classmethod
    def of_label(cls, label: str) -> Plan:
        """The plan that prints as a label.

        Raises:
            PlanError: as for `parse`.

        Example:
            >>> Plan.of_label("as written") == Plan(), Plan.of_label("--bf16").label
            (True, '--bf16')
        """
        return cls() if label == cls().label else cls.parse(label)

    @classmethod
    def parse_known(cls, words: list[str]) -> tuple[Plan, list[str]]:
        """Read the plan's flags out of a list of words and return the words that are not its own."""
        settings: dict[str, Any] = {}
        given: dict[str, str] = {}
        rest: list[str] = []
        waiting = list(words)
        while waiting:
            word = waiting.pop(0)
            flag, has_value, value = word.partition("=")
            spec = BY_FLAG.get(flag)
            if spec is None:
                rest.append(word)
                continue
            if flag in spec.shorthands:
                if has_value:
                    raise PlanError(f"{flag} takes no value; it stands for '{spec.flag} {spec.shorthands[flag]}'")
                value = spec.shorthands[flag]
            elif not has_value:
                value = _take_value(spec, waiting)
            if spec.name in given:
                raise PlanError(f"{given[spec.name]} and {flag} both set the {spec.name}; give one of them")
            given[spec.name] = flag
            settings[spec.name] = spec.parse(value)
        return cls(**settings), rest


def _take_value(spec: PlanField, waiting: list[str]) -> str:
    if waiting and not waiting[0].startswith("--"):
        return waiting.pop(0)
    if spec.bare is None:
        raise PlanError(f"{spec.flag} needs a value: {spec.flag} {spec.metavar}")
    return spec.bare


FIELDS: tuple[PlanField, ...] = tuple(each.metadata["spec"] for each in fields(Plan))
BY_NAME = {spec.name: spec for spec in FIELDS}
BY_FLAG = {flag: spec for spec in FIELDS for flag in (spec.flag, *spec.shorthands)}


def plan_flags() -> tuple[str, ...]:
    """Return every flag a plan understands, long forms and shorthands."""
    return tuple(BY_FLAG)


def unknown_flag(word: str, also: tuple[str, ...] = ()) -> PlanError:
    """Return the error for a word that is no flag, naming the nearest flag."""
    allowed = [*plan_flags(), *also]
    return PlanError(f"unknown flag {word}{did_you_mean(word, allowed)}; flags are {', '.join(allowed)}")
