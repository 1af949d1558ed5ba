"""`plan_space`: the plans that a prediction of everything and a search consider.

Of the settings in it, these are *exact*: the gradient is that of the loop as written, up to the order of
sums (accumulation, checkpointing, offload, chunked loss, tiled layers). The others *change numerics* within a documented
tolerance: precision, and the 8-bit optimizer.

What works on the model within a pass (checkpointing, precision, activations off the device, chunked loss) has to
be traced, combination by combination; accumulation and what works on the optimizer follow nearly for free. So all
of the latter are combined with ten combinations of the former:

- checkpointing off, selective and full, each in the precision as given and in 16 bits (6);
- activations off the device, with nothing else of these (1): checkpointing frees the same bytes without moving any;
- chunked loss, alone and beside full checkpointing, which leaves the peak in the loss, in both precisions (3).

Left out, and kept where the user has set them:

- Adafactor and SGD update by another rule than Adam: another training run, not a cheaper way to the same one.
- fp16 beside bf16: the same bytes at the same rate with a smaller range. It takes the place of bf16 on GPUs
  that have no bf16 (`half_format`).
- fp32 and tf32: neither holds fewer bytes. Pure bf16 holds the fewest of all, and keeps no fp32 copy of the weights, so
  that small updates are lost in training: nothing to be chosen for somebody who has not asked.
- checkpointing every N blocks, and by a budget: between off and full in both memory and time. A budget is a number that
  only its user knows: what the search is given is the size of the device, most of which is taken by other things.
- tiled layers: between off and full checkpointing in both memory and time where they are not beside it, and each
  number of tiles is a pass to be traced.
- gradient release: it serves loops that do nothing between backward and step, which only the loop itself can show,
  and each plan with it has to be traced whole.
- parameters off the device: each plan with it has to be traced whole as well.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from memlab.errors import PlanError
from memlab.plan import FIELDS, Offloaded, Plan, Precision

_FIRST_WITH_BF16 = (8, 0)


def plan_space(
    fixed: Plan = Plan(),  # noqa: B008 - frozen
    *,
    rows: int | None = None,
    lossless: bool = False,
    half: Precision = Precision.BF16,
) -> tuple[Plan, ...]:
    """Every sensible combination of settings, without repetition and without those that exclude each other.

    Args:
        fixed: fields that differ from the default keep this value in every plan.
        rows: rows of a batch; it is not split into more micro-batches than that. None for any number.
        lossless: vary exact settings only; what `fixed` says stays as it is.
        half: the 16-bit format that `keep` is compared with: bf16, or fp16 on a GPU without bf16.

    Returns:
        The plans: `fixed` first, then by the number of settings that differ from it.

    Example:
        >>> len(plan_space()), len(plan_space(lossless=True))
        (200, 60)
        >>> [plan.label for plan in plan_space(Plan.parse("--adam8bit --offload optimizer"), rows=1, lossless=True)][:3]
        ['--adam8bit --offload optimizer', '--adam8bit --offload optimizer --chunk-loss', \
'--checkpoint selective --adam8bit --offload optimizer']
    """
    choices: dict[str, tuple[Any, ...]] = {
        spec.name: tuple(spec.parse(text) for text in spec.searched) for spec in FIELDS if spec.searched
    }
    choices["accumulation"] = tuple(n for n in choices["accumulation"] if rows is None or n <= max(1, rows))
    choices["precision"] = (Precision.KEEP, half)
    kept = set(fixed.changes()) | {spec.name for spec in FIELDS if lossless and not spec.is_exact}
    choices |= {name: (getattr(fixed, name),) for name in kept}
    plans = [plan for values in product(*choices.values()) if (plan := _plan(dict(zip(choices, values, strict=True))))]
    # a stable sort: within a number of changes the order is that of the fields
    ordered = sorted(dict.fromkeys(plans), key=lambda plan: len(plan.changes()))
    return tuple(plan for plan in ordered if _is_worth_a_trace(plan, fixed))


def half_format(compute_capability: tuple[int, int] | None) -> Precision:
    """The 16-bit format that a device computes in.

    Example:
        >>> half_format((7, 5)).value, half_format(None).value
        ('fp16', 'bf16')
    """
    has_bf16 = compute_capability is None or compute_capability >= _FIRST_WITH_BF16
    return Precision.BF16 if has_bf16 else Precision.FP16


def _plan(settings: dict[str, Any]) -> Plan | None:
    """The plan of these settings; None when they exclude each other."""
    try:
        return Plan(**settings)
    except PlanError:
        return None


def _is_worth_a_trace(plan: Plan, fixed: Plan) -> bool:
    """Return whether what a plan does to the model is among the usual combinations."""
    spilled = plan.tier_of(Offloaded.ACTIVATIONS) is not None and fixed.tier_of(Offloaded.ACTIVATIONS) is None
    tiled = plan.loss is not fixed.loss
    as_given = plan.precision is fixed.precision and plan.checkpointing == fixed.checkpointing
    if spilled:
        return as_given and not tiled
    return not tiled or as_given or plan.checkpointing == "full"
