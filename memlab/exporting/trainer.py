"""transformers.Trainer: TrainingArguments, and code for what they have no argument for."""

from __future__ import annotations

from memlab.exporting.parts import (
    ENABLE,
    FROZEN_STAYS,
    SELECTIVE_CONTEXT,
    adapters_config,
    has_switch_for_checkpointing,
    header,
    indent,
    loaded_base,
    offloads_frozen,
    offloads_model_states,
    replacement_of,
    torchrun,
    wanted,
)
from memlab.plan import Gradients, Loss, Offloaded, OptimizerChoice, Plan, Precision, Tier
from memlab.plan.scale import Scale

_PRECISION: dict[Precision, list[str]] = {
    Precision.FP32: ["fp16=False,", "bf16=False,", "tf32=False,"],
    Precision.TF32: ["tf32=True,"],
    Precision.FP16: ["fp16=True,"],
    Precision.BF16: ["bf16=True,"],
}
_ACCUMULATION_COMMENT = """
# Some models take **kwargs and ignore num_items_in_batch (BertForSequenceClassification is one). Trainer then adds
# up the losses of the micro-batches instead of averaging them: gradients are {n} times too large. For them:
# trainer.model_accepts_loss_kwargs = False"""

_NAME_OF_CHECKPOINTING = [
    "# the name since transformers 5.23, or the one before",
    'is_new = hasattr(TrainingArguments, "activation_checkpointing")',
    'checkpointing = "activation_checkpointing" if is_new else "gradient_checkpointing"',
]


def to_trainer(plan: Plan, scale: Scale | None = None, nproc: int = 1) -> str:
    """Return TrainingArguments, and the code they have no argument for."""
    names = "Trainer, TrainingArguments" if plan.tier_of(Offloaded.ACTIVATIONS) else "TrainingArguments"
    imports = [*_imports(plan), f"from transformers import {names}"]
    start = [] if scale is None else [f"# {torchrun(nproc)}"]
    head = [header(plan if scale is None else scale), *_needed(plan, scale), *start, *imports, ""]
    head += _arguments(plan, scale, nproc)
    return "\n\n\n".join(["\n".join(head), *_notes(plan, scale)]) + "\n"


def _needed(plan: Plan, scale: Scale | None) -> list[str]:
    """Return which newer versions the arguments need, where older ones have nothing like them."""
    return wanted((
        ("# needs transformers 5.16 or newer: every_n_layers", plan.checkpointing.every > 1),
        ("# needs transformers 5.10 or newer: older ones pass over auto_wrap_policy and cpu_offload in fsdp_config",
         scale is not None and scale.engine == "fsdp2"),
    ))  # fmt: skip


def _imports(plan: Plan) -> list[str]:
    is_selective = plan.checkpointing == "selective"
    needs_torch = is_selective or plan.precision is Precision.PURE_BF16 or plan.tier_of(Offloaded.ACTIVATIONS)
    return wanted([
        ("import functools\n", is_selective),
        ("import torch", needs_torch),
        ("from torch.utils.checkpoint import create_selective_checkpoint_contexts", is_selective),
        ("from peft import LoraConfig, get_peft_model", plan.adapters.is_on),
    ])  # fmt: skip


def _arguments(plan: Plan, scale: Scale | None, nproc: int) -> list[str]:
    parts = plan.accumulation * nproc
    before = ["batch_size = 8  # as you train today"] if parts > 1 else []
    arguments = ['output_dir="out",']
    if parts > 1:
        arguments.append(f"per_device_train_batch_size=max(1, batch_size // {parts}),")
    if plan.accumulation > 1:
        arguments.append(f"gradient_accumulation_steps={plan.accumulation},")
    if has_switch_for_checkpointing(plan):
        every = f', "every_n_layers": {plan.checkpointing.every}' if plan.checkpointing.every > 1 else ""
        before += _NAME_OF_CHECKPOINTING
        if scale is not None and scale.engine == "fsdp2":
            before.append(
                "# not in fsdp_config, as transformers advises: that draws other dropout masks when it recomputes"
            )
        arguments.append(f'**{{checkpointing: True, f"{{checkpointing}}_kwargs": {{"use_reentrant": False{every}}}}},')
    arguments += _PRECISION.get(plan.precision, [])
    if plan.optimizer is not OptimizerChoice.KEEP:
        row = replacement_of(plan)
        rates = "" if row.rate == 1 else f"  # with {row.rate} × learning_rate and {1 / row.rate:g} × weight_decay"
        arguments.append(f'optim="{row.trainer}",{rates}')
    arguments += _engine(plan, scale)
    return [*before, "args = TrainingArguments(", *indent(arguments, 4), ")"]


def _engine(plan: Plan, scale: Scale | None) -> list[str]:
    if scale is None or scale.engine == "ddp":
        return []
    if scale.engine != "fsdp2":
        return [f'deepspeed="deepspeed.json",  # memlab.export("{scale}", to="deepspeed")']
    settings = ['"version": 2', '"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"']
    if offloads_model_states(plan):
        settings.append('"cpu_offload": True')
    return ["fsdp=True,", "fsdp_config={", *indent([f"{setting}," for setting in settings], 4), "},"]


def _notes(plan: Plan, scale: Scale | None) -> list[str]:
    """Return what TrainingArguments has no argument for: code where a few lines do it, else the way round."""
    disk = _DISK if plan.tier_of(Offloaded.ACTIVATIONS) is Tier.DISK else ""
    notes = (
        (_ACCUMULATION_COMMENT.format(n=plan.accumulation), plan.accumulation > 1),
        (_WEIGHTS, plan.precision in (Precision.FP32, Precision.FP16, Precision.BF16)),
        (_SELECTIVE, plan.checkpointing == "selective"),
        (_BUDGET, plan.checkpointing.budget_bytes is not None),
        (_PURE_BF16, plan.precision is Precision.PURE_BF16),
        (_ACTIVATIONS.format(disk=disk), plan.tier_of(Offloaded.ACTIVATIONS) is not None),
        (_STATE, scale is None and plan.tier_of(Offloaded.OPTIMIZER) is not None),
        (_PARAMS, scale is None and plan.tier_of(Offloaded.PARAMS) is not None),
        (f"\n# {FROZEN_STAYS}", offloads_frozen(plan)),
        ("\n" + "\n".join(f"# {line}" for line in loaded_base(plan)), loaded_base(plan)),
        (_LOSS, plan.loss is Loss.CHUNKED),
        (_TILES, plan.tiling > 1),
        (_ADAPTERS.format(config=adapters_config(plan)), plan.adapters.is_on),
        (_GRADIENTS, plan.gradients is Gradients.RELEASE),
    )
    return [text.strip("\n") for text in wanted(notes)]


_SELECTIVE = f'''

def checkpoint_blocks(model):
    """TrainingArguments takes no functions: call this before Trainer(model=model, args=args)."""{SELECTIVE_CONTEXT}
{ENABLE}
    enable({{"use_reentrant": False, "context_fn": contexts}})
'''

_BUDGET = """
# TrainingArguments cannot choose blocks by what they keep: its every_n_layers takes blocks by number alone. Call
# checkpoint_blocks of memlab.export(plan, to="torch") before Trainer(model=model, args=args), on one of your batches"""

_PURE_BF16 = '''

def to_bf16(model):
    """bf16=True would keep fp32 weights: call this before Trainer(model=model, args=args) instead."""
    return model.to(torch.bfloat16)
'''

_ACTIVATIONS = '''

class OffloadingTrainer(Trainer):
    """Use it in place of Trainer: TrainingArguments offloads only what checkpointing keeps."""{disk}

    def compute_loss(self, *args, **kwargs):
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return super().compute_loss(*args, **kwargs)
'''

_WEIGHTS = """
# These arguments leave the weights in the format they were loaded in, and this plan wants them in fp32:
# from_pretrained(..., dtype=torch.float32), or model.float() before Trainer(model=model, args=args)"""

_STATE = """
# TrainingArguments cannot offload optimizer state on one device. Pass it the DeepSpeed file of this plan:
# TrainingArguments(..., deepspeed="deepspeed.json"), with deepspeed.json from memlab.export(plan, to="deepspeed")"""

_PARAMS = """
# TrainingArguments cannot offload parameters on one device. The DeepSpeed file of this plan does (ZeRO-3):
# TrainingArguments(..., deepspeed="deepspeed.json"), with deepspeed.json from memlab.export(plan, to="deepspeed")"""

_LOSS = """
# TrainingArguments cannot chunk the loss by itself. use_liger_kernel=True does it for the models Liger knows
# (CUDA, pip install liger-kernel); for others see chunked_loss in memlab.export(plan, to="torch")"""


_TILES = """
# TrainingArguments cannot tile feed-forward parts: call tile_feed_forwards of memlab.export(plan, to="torch")
# before Trainer(model=model, args=args)"""

_ADAPTERS = '''

# trl's trainers take it as it is: SFTTrainer(model=model, args=args, peft_config=adapters)
adapters = {config}


def with_adapters(model):
    """TrainingArguments has no adapters: Trainer(model=with_adapters(model), args=args)."""
    return get_peft_model(model, adapters)
'''

_GRADIENTS = """
# TrainingArguments cannot free gradients in the backward pass: see update_in_backward in
# memlab.export(plan, to="torch"). Trainer takes the norm of all gradients in every step, which needs all of them"""


_DISK = "\n\n    # the plan says disk: Trainer has nothing for files, this keeps the activations in host memory"
