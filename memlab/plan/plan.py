"""`Plan`: which memory-saving techniques, with which parameters.

A plan is a frozen value. A new technique adds one field to `Plan` and one row to `fields.FIELDS`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from memlab.errors import PlanError
from memlab.plan.fields import BY_FLAG, BY_NAME, FIELDS, PlanField, unknown_flag
from memlab.plan.settings import (
    EIGHT_BIT,
    ENGINES,
    Adapters,
    BaseBits,
    BatchNorm,
    Checkpointing,
    Gradients,
    Loss,
    Offload,
    Offloaded,
    OptimizerChoice,
    Padding,
    Precision,
    ScaleOut,
    Tier,
)


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

    accumulation: int = 1
    batchnorm: BatchNorm = BatchNorm.KEEP
    checkpointing: Checkpointing = Checkpointing("off")  # noqa: RUF009 - frozen
    precision: Precision = Precision.KEEP
    optimizer: OptimizerChoice = OptimizerChoice.KEEP
    offload: Offload = ()
    loss: Loss = Loss.KEEP
    gradients: Gradients = Gradients.KEEP
    padding: Padding = Padding.KEEP
    tiling: int = 1
    adapters: Adapters = Adapters("off")  # noqa: RUF009 - frozen
    base: BaseBits = BaseBits.KEEP
    scale: ScaleOut = ScaleOut.NONE

    def __post_init__(self) -> None:
        for spec in FIELDS:
            value = getattr(self, spec.name)
            object.__setattr__(self, spec.name, spec.parse(value if isinstance(value, str) else spec.write(value)))
        for excludes, words in _CONFLICTS:
            if excludes(self):
                raise PlanError(words)
        if self.scale is not ScaleOut.NONE:
            for what, instead in engine_conflicts(self.scale, replace(self, scale=ScaleOut.NONE), in_ranks=False):
                raise PlanError(f"{what}; {instead}")

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

    def changes(self, since: Plan | None = None) -> tuple[str, ...]:
        """Names of the fields that differ from the defaults, or from those of another plan."""
        return tuple(
            spec.name
            for spec in FIELDS
            if getattr(self, spec.name) != (spec.default if since is None else getattr(since, spec.name))
        )

    def settings(self) -> Iterator[Plan]:
        """Yield plans with one setting each, of those that differ from the defaults.

        Example:
            >>> [plan.label for plan in Plan.parse("--bf16 --offload optimizer,activations").settings()]
            ['--bf16', '--offload activations', '--offload optimizer']
        """
        for name in self.changes():
            yield from (Plan(**{name: part}) for part in BY_NAME[name].parts(getattr(self, name)))

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
        values = {name: (getattr(self, name), getattr(other, name)) for name in other.changes()}
        return replace(self, **{name: BY_NAME[name].joined(*both) for name, both in values.items()})

    @property
    def is_exact(self) -> bool:
        """Return whether gradients and updates are those of the loop as written."""
        return self.has_numbers_of(Plan())

    def has_numbers_of(self, other: Plan) -> bool:
        """Return whether both compute the same, where one contains the other."""
        return not self.numerics_from(other)

    def numerics_from(self, other: Plan) -> tuple[str, ...]:
        """Names of the fields by which this plan computes other numbers than another one."""
        return tuple(
            name for name in self.changes(other) if not BY_NAME[name].is_same(getattr(self, name), getattr(other, name))
        )

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


# settings that exclude each other: whether a plan has both, and the error
_CONFLICTS: tuple[tuple[Callable[[Plan], Any], str], ...] = (
    (
        lambda plan: plan.padding is Padding.PACKED and plan.accumulation > 1,
        "--pack and --accumulate exclude each other: the rows of a packed batch stand in one row, which is not split; drop one of the two, or accumulate in the loop",
    ),
    (
        lambda plan: plan.optimizer is OptimizerChoice.PAGED_ADAM8BIT and plan.tier_of(Offloaded.OPTIMIZER),
        "--optim paged-adam8bit and --offload optimizer exclude each other: paged moments move to the host by themselves; drop one of the two",
    ),
    (
        lambda plan: plan.optimizer is OptimizerChoice.SGD and plan.tier_of(Offloaded.OPTIMIZER),
        "--optim sgd and --offload optimizer exclude each other: SGD without momentum keeps no state to offload; drop one of the two",
    ),
    (
        lambda plan: plan.gradients is Gradients.RELEASE and plan.precision is Precision.FP16,
        "--release-grads and --fp16 exclude each other: fp16 updates only when no gradient overflowed, and the last one is known at the end of the backward pass; use --bf16 with --release-grads",
    ),
    (
        lambda plan: plan.checkpointing.budget_bytes is not None and plan.tier_of(Offloaded.ACTIVATIONS),
        "--checkpoint budget and --offload activations exclude each other: offloaded activations use nothing of the budget; drop one of the two",
    ),
    (
        lambda plan: plan.base is not BaseBits.KEEP and not plan.adapters.is_on,
        "--base is about frozen weights beside adapters, and there are none; add --lora",
    ),
    (
        lambda plan: plan.base is not BaseBits.KEEP and plan.adapters.is_dora,
        "--base and --lora dora exclude each other: DoRA takes the norm of the weights in every call; drop dora or --base",
    ),
    (
        lambda plan: plan.base is not BaseBits.KEEP and plan.tier_of(Offloaded.PARAMS),
        "--base and --offload params exclude each other: the weights are off the device already, in fewer bits on it; drop one of the two",
    ),
    (
        lambda plan: plan.base is not BaseBits.KEEP and plan.precision is Precision.PURE_BF16,
        "--base and --precision pure-bf16 exclude each other: both keep the weights in other bits; use --bf16 with --base",
    ),
    (
        lambda plan: plan.base is not BaseBits.KEEP and plan.tiling > 1,
        "--base and --tile exclude each other: tiles read the weights of layers, which are off the device; drop one of the two",
    ),
)


def engine_conflicts(engine: str, plan: Plan, *, in_ranks: bool) -> Iterator[tuple[str, str]]:
    """Yield what does not go together with an engine, and what to do instead.

    Args:
        engine: one of `ENGINES`.
        plan: what applies beside it.
        in_ranks: whether it trains in processes of its own, where batches are split among them as well.
    """
    for conflicts in (_settings_beside, _offloads_beside):
        for flag, reason, instead in conflicts(engine, plan, in_ranks):
            yield f"--scale {engine} and {flag} exclude each other: {reason}", instead


def _settings_beside(engine: str, plan: Plan, in_ranks: bool) -> Iterator[tuple[str, str, str]]:
    converts = plan.optimizer in EIGHT_BIT and in_ranks
    if converts and engine != "ddp":
        yield (
            BY_NAME["optimizer"].show(plan.optimizer),
            f"8-bit moments have a scale for each block of a whole parameter, and {engine} keeps parts of parameters",
            "use --scale ddp, or leave it out: each rank has only its part of the moments",
        )
    allowed = {"accumulation" if in_ranks else "", "optimizer" if converts else ""}
    for name in plan.changes():
        if name not in allowed and not BY_NAME[name].is_beside_engines:
            yield BY_NAME[name].show(getattr(plan, name)), "the engine has the model", "drop one of the two"
    if plan.precision in (Precision.FP16, Precision.PURE_BF16):
        yield f"--precision {plan.precision}", "it needs scaled losses or converted moments", "use --bf16"
    if in_ranks and engine == "zero3" and plan.checkpointing == "selective":
        reason = "it replays operators one by one, and zero3 gathers parameters among them"
        yield "--checkpoint selective", reason, "use --checkpoint, or --scale fsdp2"


def _offloads_beside(engine: str, plan: Plan, in_ranks: bool) -> Iterator[tuple[str, str, str]]:
    needs_state = engine == ("fsdp2" if in_ranks else "zero3") and plan.tier_of(Offloaded.OPTIMIZER) is None
    for what, tier in plan.offload:
        flag = f"--offload {what}{'' if tier is Tier.AUTO else f':{tier}'}"
        able = [name for name, offloads in ENGINES.items() if what in offloads]
        if what is Offloaded.ACTIVATIONS:
            yield flag, "the engine runs the model", "use --checkpoint"
        elif what is Offloaded.FROZEN:
            yield flag, "the engine has the model, and places its parameters", "drop one of the two"
        elif engine not in able:
            kept = "optimizer state" if what is Offloaded.OPTIMIZER else "parameters"
            yield flag, f"{engine} keeps {kept} on the device", f"use --scale {', '.join(able[:-1])} or {able[-1]}"
        elif tier is Tier.DISK and engine != "zero3":
            yield flag, f"{engine} does not offload to files", "drop ':disk', or use --scale zero3"
        elif tier is Tier.DISK and what is Offloaded.PARAMS:
            reason = "parameters that DeepSpeed 0.19 swaps to files come back with other values"
            yield flag, reason, "use --offload optimizer:disk,params"
        elif what is Offloaded.PARAMS and needs_state:
            reason = f"{engine} has the optimizer's state where parameters are"
            yield flag, reason, "use --offload optimizer,params"
