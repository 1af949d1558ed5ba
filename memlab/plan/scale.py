"""`Scale`: which engine many processes train under, and the plan each of them follows. Needs no torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from memlab.errors import PlanError, RefusalError
from memlab.plan import Offloaded, Plan, Precision, Tier
from memlab.plan.fields import BY_NAME, EIGHT_BIT, did_you_mean

ENGINES = ("ddp", "fsdp2", "tp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Scale:
    """An engine and a plan.

    Args:
        engine: one of `ENGINES`.
        plan: what else applies on every rank.

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
        for refuse in (self._refuse_fields, self._refuse_checkpointing, self._refuse_precision, self._refuse_offload):
            refuse()

    @classmethod
    def parse(cls, text: str) -> Scale:
        """Read ``--scale ENGINE`` and a plan's flags.

        Raises:
            PlanError: no or an unknown engine, or flags that are no plan.
            RefusalError: the engine does not go together with the plan.
        """
        words = shlex.split(text.replace("--scale=", "--scale "))
        if words.count("--scale") != 1 or words[-1] == "--scale":
            raise PlanError(f"{text!r}: expected --scale and one of {', '.join(ENGINES)}, as in '--scale fsdp2'")
        at = words.index("--scale")
        return cls(words[at + 1], Plan.parse(shlex.join([*words[:at], *words[at + 2 :]])))

    def __str__(self) -> str:
        return f"--scale {self.engine} {self.plan}".strip()

    def _refuse_fields(self) -> None:
        converted = self.plan.optimizer in EIGHT_BIT
        if converted and self.engine != "ddp":
            raise RefusalError(
                "scale",
                f"8-bit moments have a scale for each block of a whole parameter, and {self.engine} keeps parts of parameters",
                "use --scale ddp, or leave it out: each rank has only its part of the moments",
            )
        allowed = {"accumulation", *(["optimizer"] if converted else [])}
        strange = [name for name in self.plan.changes() if name not in allowed and not BY_NAME[name].is_beside_engines]
        if strange:
            raise RefusalError(
                "scale",
                f"{strange[0]} is not available under --scale {self.engine}",
                "leave it out, or train in one process",
            )

    def _refuse_checkpointing(self) -> None:
        if self.engine == "zero3" and self.plan.checkpointing == "selective":
            raise RefusalError(
                "scale",
                "--checkpoint selective replays operators one by one, and zero3 gathers parameters among them",
                "use --checkpoint, or --scale fsdp2",
            )

    def _refuse_precision(self) -> None:
        if self.plan.precision in (Precision.FP16, Precision.PURE_BF16):
            raise RefusalError(
                "scale",
                f"--precision {self.plan.precision} needs scaled losses or converted moments, which {self.engine} keeps itself",
                "use --bf16",
            )

    def _refuse_offload(self) -> None:
        for what, tier in self.plan.offload:
            if what is Offloaded.ACTIVATIONS:
                raise RefusalError(
                    "scale", f"--offload {what} is not available under --scale {self.engine}", "use --checkpoint"
                )
            if what is Offloaded.PARAMS and self.engine not in ("fsdp2", "zero3"):
                raise RefusalError(
                    "scale", f"{self.engine} keeps parameters on the device", "use --scale fsdp2 or zero3"
                )
            if what is Offloaded.OPTIMIZER and self.engine in ("ddp", "tp", "zero1"):
                raise RefusalError(
                    "scale", f"{self.engine} keeps optimizer state on the device", "use --scale fsdp2 or zero2"
                )
            if tier is Tier.DISK and self.engine != "zero3":
                raise RefusalError("scale", f"{self.engine} does not offload to files", "use --scale zero3")
        if (
            self.engine == "fsdp2"
            and self.plan.tier_of(Offloaded.PARAMS)
            and not self.plan.tier_of(Offloaded.OPTIMIZER)
        ):
            raise RefusalError(
                "scale",
                "fsdp2 updates parameters where they rest, so their optimizer state rests there too",
                "use --offload params,optimizer",
            )
        if self.plan.tier_of(Offloaded.PARAMS) is Tier.DISK:
            raise RefusalError(
                "scale",
                "parameters that DeepSpeed 0.19 swaps to files come back with other values",
                "use --offload optimizer:disk,params",
            )

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
