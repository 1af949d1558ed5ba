"""A plan as code: the same techniques, written out for a script that does not use memlab.

Each target is a list of parts; a part is printed only when the plan needs it, so the empty plan
prints the plain thing. What a target cannot express is said in its output, never dropped.

A plan for several processes is a `Scale`: its engine decides which targets there are, and every target says how it is
started.

Known limitations: the torch target serves models whose call returns an object with a `loss`; its
chunked loss serves causal language models with a plain linear head.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace

from memlab.errors import PlanError
from memlab.exporting.accelerate import to_accelerate
from memlab.exporting.deepspeed import to_deepspeed
from memlab.exporting.ranks import to_ranks
from memlab.exporting.torch import to_torch
from memlab.exporting.trainer import to_trainer
from memlab.plan import Plan, ScaleOut
from memlab.plan.scale import Scale, take_engine
from memlab.plan.settings.scale import ENGINES, zero_stage

_ZERO = tuple(filter(zero_stage, ENGINES))
_PLANS: dict[str, Callable[[Plan], str]] = {
    "torch": to_torch,
    "trainer": to_trainer,
    "accelerate": to_accelerate,
    "deepspeed": to_deepspeed,
}
_SCALES: dict[str, tuple[tuple[str, ...], Callable[[Plan, Scale, int], str]]] = {
    "torch": (("ddp", "fsdp2"), to_ranks),
    "trainer": (("ddp", "fsdp2", *_ZERO), to_trainer),
    "accelerate": (("ddp", "fsdp2", *_ZERO), to_accelerate),
    "deepspeed": (_ZERO, to_deepspeed),
    "fsdp2": (("fsdp2",), to_ranks),
}
TARGETS = tuple(_SCALES)


def export(plan: Plan | Scale | str, to: str, *, nproc: int = 2, models: Sequence[str] = ()) -> str:
    """Print a plan as code or as a configuration file.

    Args:
        plan: the techniques to write down; with ``--scale ENGINE`` (or a `Scale`) for several processes.
        to: "torch" (a training loop; a program for torchrun under ddp and fsdp2), "trainer" (TrainingArguments),
            "accelerate" (a YAML file for `accelerate launch --config_file`), "deepspeed" (a JSON file) or "fsdp2" (the
            program for torchrun; of a plan without an engine as well).
        nproc: number of processes, where there is an engine.
        models: names of the models that train together under the plan, where there are several.

    Returns:
        Text that runs, or loads, as it stands, with the versions that memlab allows; where a setting needs a newer library, the
        first lines say so.

    Raises:
        PlanError: an unknown target, one that does not know the engine, or flags that are no plan.
        RefusalError: the engine does not go together with the plan.

    Example:
        >>> print(export(Plan.parse("--accumulate 4 --adam8bit"), to="trainer"))  # doctest: +ELLIPSIS
        # memlab plan: --accumulate 4 --adam8bit
        from transformers import TrainingArguments
        ...
        >>> print(export("--scale fsdp2 --checkpoint", to="accelerate", nproc=4))  # doctest: +ELLIPSIS
        # memlab plan: --scale fsdp2 --checkpoint
        # accelerate launch --config_file accelerate.yaml train.py
        compute_environment: LOCAL_MACHINE
        distributed_type: FSDP
        ...
    """
    if len(models) > 1:
        # a file without comments is one for each of them as it stands
        first, *rest = export(plan, to, nproc=nproc).split("\n")
        each = (
            f"# models: {', '.join(models)}; what is done here to the model and its optimizer is done to each of them"
        )
        return "\n".join([first, *([each] if first.startswith("#") else []), *rest])
    if to not in TARGETS:
        raise PlanError(f"export to {to!r}: allowed are {', '.join(TARGETS)}")
    if not isinstance(nproc, int) or nproc < 1:
        raise PlanError(f"nproc {nproc!r}: expected a whole number of processes, 1 or more")
    asked = parsed(plan) if isinstance(plan, str) else plan
    if isinstance(asked, Plan):
        if asked.scale is not ScaleOut.NONE:
            asked = Scale(str(asked.scale), replace(asked, scale=ScaleOut.NONE))
        elif to in _PLANS:
            return _PLANS[to](asked)
        else:
            asked = Scale(to, asked)
    engines, written = _SCALES[to]
    if asked.engine not in engines:
        others = [target for target, (known, _) in _SCALES.items() if asked.engine in known]
        raise PlanError(f"--scale {asked.engine} to {to!r}: allowed are {', '.join(others) or 'no targets yet'}")
    return written(asked.plan, asked, nproc)


def parsed(text: str) -> Plan | Scale:
    """Flags as a plan, or with an engine as a scale."""
    engine, _ = take_engine(shlex.split(text))
    return Scale.parse(text) if engine is not None else Plan.parse(text)
