"""`Scale`: which engine many processes train under, and the plan each of them follows. Needs no torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memlab.errors import PlanError, RefusalError
from memlab.plan.fields import did_you_mean
from memlab.plan.plan import Plan
from memlab.plan.settings.offload import Offloaded, Tier
from memlab.plan.settings.scale import ENGINES, engine_conflicts

# the last one makes the engine of a plan for a live workload; `memlab` gives that of `memlab.scaleout`
ENGINE_MAKERS: list[Callable[[Plan, Any], Any]] = []


@dataclass(frozen=True)
class Scale:
    """An engine and a plan.

    Raises:
        RefusalError: the engine does not go together with the plan.

    Example:
        >>> scale = Scale.parse("--scale zero3 --checkpoint")
        >>> scale.engine, str(scale.plan), str(scale)
        ('zero3', '--checkpoint', '--scale zero3 --checkpoint')
    """

    engine: str
    plan: Plan = field(default_factory=Plan)

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            hint = did_you_mean(self.engine, [*ENGINES])
            raise PlanError(f"--scale {self.engine}: allowed are {', '.join(ENGINES)}{hint}")
        for what, instead in engine_conflicts(self.engine, self.plan, in_ranks=True):
            raise RefusalError("scale", what, instead)

    @classmethod
    def parse(cls, text: str) -> Scale:
        """Read ``--scale ENGINE`` and a plan's flags.

        Raises:
            PlanError: no or an unknown engine, or flags that are no plan.
            RefusalError: the engine does not go together with the plan.
        """
        engine, others = take_engine(shlex.split(text))
        if engine is None:
            raise PlanError(f"{text!r}: expected --scale and one of {', '.join(ENGINES)}, as in '--scale fsdp2'")
        return cls(engine, Plan.parse(shlex.join(others)))

    def __str__(self) -> str:
        return f"--scale {self.engine} {self.plan}".strip()

    @property
    def uses_files(self) -> bool:
        """Return whether something is offloaded to the disk."""
        return any(tier is Tier.DISK for _, tier in self.plan.offload)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what the engine does beyond what was asked for, in words."""
        asked = {what for what, _ in self.plan.offload}
        if self.engine == "fsdp2" and asked == {Offloaded.OPTIMIZER}:
            return (
                "FSDP2 offloads parameters and gradients with the optimizer state: it updates them where they rest",
            )
        return ()


def take_engine(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the engine that words name, None without ``--scale``, and the other words.

    Example:
        >>> take_engine(["--bf16", "--scale=ddp"])
        ('ddp', ['--bf16'])
    """
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--scale=") else [word])]
    if "--scale" not in split:
        return None, words
    at = split.index("--scale")
    if at + 1 == len(split) or split[at + 1].startswith("-"):
        raise PlanError(f"--scale needs a value: --scale {'|'.join(ENGINES)}")
    return split[at + 1], [*split[:at], *split[at + 2 :]]
