"""A plan as code: the same techniques, written out for a script that does not use memlab.

Each target is a list of parts; a part is printed only when the plan needs it, so the empty plan
prints the plain thing. What a target cannot express is said in its output, never dropped.

Known limitations: the torch target serves models whose call returns an object with a `loss`; its
chunked loss serves causal language models with a plain linear head.
"""

from __future__ import annotations

from collections.abc import Callable

from memlab.errors import PlanError
from memlab.exporting._accelerate import to_accelerate
from memlab.exporting._deepspeed import to_deepspeed
from memlab.exporting._torch import to_torch
from memlab.exporting._trainer import to_trainer
from memlab.plan import Plan, ScaleOut


def export(plan: Plan, to: str) -> str:
    """Print a plan as code or as a configuration file.

    Args:
        plan: the techniques to write down.
        to: "torch" (a training loop), "trainer" (TrainingArguments), "accelerate" (a YAML file for
            `accelerate launch --config_file`) or "deepspeed" (a JSON file).

    Returns:
        Text that runs, or loads, as it stands.

    Raises:
        PlanError: an unknown target, or a plan with an engine.

    Example:
        >>> print(export(Plan.parse("--accumulate 4 --adam8bit"), to="trainer"))  # doctest: +ELLIPSIS
        # memlab plan: --accumulate 4 --adam8bit
        from transformers import TrainingArguments
        ...
    """
    if to not in TARGETS:
        raise PlanError(f"export to {to!r}: allowed are {', '.join(TARGETS)}")
    if plan.scale is not ScaleOut.NONE:
        raise PlanError(
            f"export of --scale {plan.scale}: an engine's configuration is for several processes, and a plan's is for one; "
            "leave --scale out"
        )
    return TARGETS[to](plan)


TARGETS: dict[str, Callable[[Plan], str]] = {
    "torch": to_torch,
    "trainer": to_trainer,
    "accelerate": to_accelerate,
    "deepspeed": to_deepspeed,
}
