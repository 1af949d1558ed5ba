"""Parts that several targets share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from memlab.errors import PlanError
from memlab.extras import needing_torch
from memlab.plan import BaseBits, Loss, Offloaded, OptimizerChoice, Plan, Precision, Tier
from memlab.plan.plan import BY_NAME
from memlab.plan.scale import Scale
from memlab.plan.settings.checkpointing import SELECTIVE_KEEPS
from memlab.plan.settings.scale import zero_stage

if TYPE_CHECKING:
    from memlab.techniques.optimizer.replacements import Replacement

# fields of a plan that targets write, or say something about
WRITTEN = frozenset((
    "accumulation", "batchnorm", "checkpointing", "precision", "optimizer", "offload", "loss", "gradients", "tiling", "adapters",
    "scale",
))  # fmt: skip


def header(plan: Plan | Scale) -> str:
    """Return the comment that names the plan, and what of it is not written."""
    left_out = [f"# {line}" for line in not_written(plan.plan if isinstance(plan, Scale) else plan)]
    return "\n".join([f"# memlab plan: {str(plan) or 'none, as written'}", *left_out])


def not_written(plan: Plan) -> list[str]:
    """Return the line about settings that no target has; nothing where there are none."""
    flags = [BY_NAME[name].show(getattr(plan, name)) for name in plan.changes() if name not in WRITTEN]
    return [f"left out, since only memlab does it: {' '.join(flags)}"] if flags else []


def torchrun(nproc: int) -> str:
    """Return how a script is started on many ranks of one machine."""
    return f"torchrun --nproc-per-node {nproc} train.py"


def indent(lines: list[str], spaces: int) -> list[str]:
    """Return lines further to the right; empty ones stay empty."""
    return [" " * spaces + line if line else line for line in lines]


def block(head: str, lines: list[str]) -> list[str]:
    """Return lines within a compound statement that begins with `head`."""
    return [f"{head}:", *indent(lines, 4)]


def wanted(parts: Iterable[tuple[str, object]]) -> list[str]:
    """Return the texts whose condition is met."""
    return [text for text, is_wanted in parts if is_wanted]


def has_switch_for_checkpointing(plan: Plan) -> bool:
    """Return whether frameworks have a switch for the plan's checkpointing; they have none that weighs blocks or operators."""
    return plan.checkpointing.kind in ("full", "every")


def offloads_model_states(plan: Plan) -> bool:
    """Return whether optimizer state or parameters leave the device."""
    return plan.tier_of(Offloaded.OPTIMIZER) is not None or plan.tier_of(Offloaded.PARAMS) is not None


# where no code is written for it
FROZEN_STAYS = (
    "frozen models stay on the device: accelerate.cpu_offload(module, device) brings one for calls without gradients"
)


def offloads_frozen(plan: Plan) -> bool:
    """Return whether frozen models leave the device between uses."""
    return plan.tier_of(Offloaded.FROZEN) is not None


_BASES = {
    BaseBits.BF16: "dtype=torch.bfloat16",
    BaseBits.INT8: "quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
    BaseBits.NF4: 'quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")',
}


def loaded_base(plan: Plan) -> list[str]:
    """Return how a model is loaded with the frozen weights that the plan has beside adapters; nothing where it keeps them."""
    if plan.base is BaseBits.KEEP:
        return []
    return [
        f"frozen weights in {plan.base}, as transformers loads them: AutoModelForCausalLM.from_pretrained(name,",
        f"{_BASES[plan.base]})",
    ]


def replacement_of(plan: Plan) -> Replacement:
    """Return the optimizer that takes the place of the user's optimizer; AdamW stands for one that the plan keeps."""
    with needing_torch("an export that makes an optimizer"):
        from memlab.techniques.optimizer.replacements import REPLACEMENTS
    choice = OptimizerChoice.ADAMW if plan.optimizer is OptimizerChoice.KEEP else plan.optimizer
    row = REPLACEMENTS[choice]
    if not row.code[1]:
        raise PlanError(
            f"--optim {choice} cannot be exported: it is two optimizers, {choice} for the matrices of blocks and AdamW for the "
            "rest; choose another one with --optim"
        )
    return row


def optimizer_helper(plan: Plan) -> str:
    """The function that makes the optimizer."""
    package, call = replacement_of(plan).code
    comment = ["# the plan keeps your optimizer: put it here"] if plan.optimizer is OptimizerChoice.KEEP else []
    body = [*([package, ""] if package else []), *comment, f"return {call}"]
    return "\n".join(block("def make_optimizer(model, lr)", body))


def one_line_optimizer(plan: Plan) -> str:
    """Return the call that makes the optimizer, and the package it needs."""
    package, call = replacement_of(plan).code
    return f"{call}  ({package})" if package else call


def adapters_config(plan: Plan) -> str:
    """Return peft's configuration of the plan's adapters."""
    adapters = plan.adapters
    settings = [f"r={adapters.rank}", f"lora_alpha={adapters.alpha:g}"]
    settings += [f"lora_dropout={adapters.dropout:g}"] if adapters.dropout else []
    settings += ["use_dora=True"] if adapters.is_dora else []
    settings.append(
        f"target_modules={[*adapters.targets]!r}".replace("'", '"')
        if adapters.targets
        else 'target_modules="all-linear"'
    )
    return f"LoraConfig({', '.join(settings)})"


def by_code_of_torch(plan: Plan) -> list[str]:
    """Return how a script does what configuration files have no entry for."""
    there = "in memlab.export(plan, to='torch')"
    return wanted((
        (f"chunked loss: chunked_loss {there}", plan.loss is Loss.CHUNKED),
        (f"adapters: peft.get_peft_model(model, {adapters_config(plan)}) before prepare()", plan.adapters.is_on),
        (f"tiled layers: tile_feed_forwards {there}", plan.tiling > 1),
    ))  # fmt: skip


ENABLE = """\
    # the name since transformers 5.23, or the one before; other models have neither
    enable = getattr(model, "activation_checkpointing_enable", getattr(model, "gradient_checkpointing_enable", None))"""
_KEPT = "".join(f"        aten.{name}.default,\n" for name in SELECTIVE_KEEPS)
SELECTIVE_CONTEXT = f"""
    aten = torch.ops.aten
    kept = [
{_KEPT}    ]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)"""


def stage_of(plan: Plan, scale: Scale | None) -> int:
    """DeepSpeed offloads to the host from stage 2 (and keeps pure-bf16 there), to files and parameters only at stage 3."""
    if scale is not None:
        return zero_stage(scale.engine)
    tier = plan.tier_of(Offloaded.OPTIMIZER)
    if tier is Tier.DISK or plan.tier_of(Offloaded.PARAMS) is not None:
        return 3
    return 2 if tier is not None or plan.precision is Precision.PURE_BF16 else 0
