"""Accelerate: the YAML file of the launcher; the rest of the plan is named in comments."""

from __future__ import annotations

from memlab.exporting._parts import (
    block_stride,
    has_switch_for_checkpointing,
    header,
    indent,
    one_line_optimizer,
    zero_stage,
)
from memlab.plan import Gradients, Loss, Offloaded, OptimizerChoice, Plan, Precision, Tier

_MIXED_PRECISION = {Precision.FP16: "fp16", Precision.BF16: "bf16"}


def to_accelerate(plan: Plan) -> str:
    is_deepspeed = any(plan.tier_of(what) is not None for what in (Offloaded.OPTIMIZER, Offloaded.PARAMS))
    lines = [
        header(plan),
        "# accelerate launch --config_file accelerate.yaml train.py",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'DEEPSPEED' if is_deepspeed else repr('NO')}",
        *(_accelerate_deepspeed(plan) if is_deepspeed else []),
        f"mixed_precision: {_MIXED_PRECISION.get(plan.precision, repr('no'))}",
        "num_machines: 1",
        "num_processes: 1",
        "machine_rank: 0",
        "main_training_function: main",
        "use_cpu: false",
        "debug: false",
    ]
    return "\n".join([*lines, *_accelerate_notes(plan)]) + "\n"


def _accelerate_deepspeed(plan: Plan) -> list[str]:
    settings = [
        f"zero_stage: {zero_stage(plan)}",
        *_accelerate_tier(plan, Offloaded.OPTIMIZER, "offload_optimizer"),
        *_accelerate_tier(plan, Offloaded.PARAMS, "offload_param"),
        f"gradient_accumulation_steps: {plan.accumulation}",
        "zero3_init_flag: false",
    ]
    return ["deepspeed_config:", *indent(settings, 2)]


def _accelerate_tier(plan: Plan, what: Offloaded, name: str) -> list[str]:
    tier = plan.tier_of(what)
    if tier is Tier.DISK:
        return [f"{name}_device: nvme", f"{name}_nvme_path: nvme  # a folder on a fast disk"]
    return [f"{name}_device: {'none' if tier is None else 'cpu'}"]


def _accelerate_notes(plan: Plan) -> list[str]:
    notes = _script_notes(plan)
    return ["# The rest of the plan belongs into the script:", *(f"# - {note}" for note in notes)] if notes else []


def _script_notes(plan: Plan) -> list[str]:
    accumulate, every = plan.accumulation, block_stride(plan)
    kwargs = f", every_n_layers={every}" if every > 1 else ""
    enable = f'model.activation_checkpointing_enable({{"use_reentrant": False}}{kwargs})'
    context = "context_fn of create_selective_checkpoint_contexts, as in memlab.export(plan, to='torch')"
    activations = plan.tier_of(Offloaded.ACTIVATIONS)
    notes = (
        ((f"Accelerator(gradient_accumulation_steps={accumulate}), batches {accumulate} times smaller, and "
         "`with accelerator.accumulate(model):` around each; weight losses by target tokens"), accumulate > 1),
        (enable, has_switch_for_checkpointing(plan)),
        ("checkpointing by budget: checkpoint_blocks of memlab.export(plan, to='torch'), on one of your batches; "
         "every_n_layers takes blocks by number alone", plan.budget_bytes is not None),
        (f"selective checkpointing: model.activation_checkpointing_enable with {context}",
         plan.checkpointing == "selective"),
        ("model.float() before the optimizer is made", plan.precision is Precision.FP32),
        ('torch.set_float32_matmul_precision("high")', plan.precision is Precision.TF32),
        ("model.to(torch.bfloat16) before the optimizer is made", plan.precision is Precision.PURE_BF16),
        (f"optimizer: {one_line_optimizer(plan)}", plan.optimizer is not OptimizerChoice.KEEP),
        ("the forward pass under torch.autograd.graph.save_on_cpu(pin_memory=True)", activations is not None),
        ("activations on disk: Accelerate has nothing for files, the line above keeps them in host memory",
         activations is Tier.DISK),
        ("chunked loss: chunked_loss in memlab.export(plan, to='torch')", plan.loss is Loss.CHUNKED),
        ("tiled layers: tile_feed_forwards in memlab.export(plan, to='torch')", plan.tiling > 1),
        ("gradient release: Accelerate has nothing for it; update_in_backward in memlab.export(plan, to='torch')",
         plan.gradients is Gradients.RELEASE),
    )  # fmt: skip
    return [text for text, wanted in notes if wanted]
