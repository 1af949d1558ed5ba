"""Accelerate: the YAML file of the launcher; the rest of the plan is named in comments."""

from __future__ import annotations

from memlab.exporting.parts import (
    FROZEN_STAYS,
    by_code_of_torch,
    header,
    indent,
    loaded_base,
    offloads_frozen,
    offloads_model_states,
    one_line_optimizer,
    stage_of,
    wanted,
)
from memlab.plan import Gradients, Offloaded, OptimizerChoice, Plan, Precision, Tier
from memlab.plan.scale import Scale

_MIXED_PRECISION = {Precision.FP16: "fp16", Precision.BF16: "bf16"}


def to_accelerate(plan: Plan, scale: Scale | None = None, nproc: int = 1) -> str:
    """Return the YAML file of a plan."""
    if scale is not None:
        kind = {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}.get(scale.engine, "DEEPSPEED")
    else:
        kind = "DEEPSPEED" if offloads_model_states(plan) else repr("NO")
    notes = _script_notes(plan)
    if notes:
        notes = ["# The rest of the plan belongs into the script:", *(f"# - {note}" for note in notes)]
    lines = [
        header(plan if scale is None else scale),
        "# accelerate launch --config_file accelerate.yaml train.py",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {kind}",
        *(_deepspeed_section(plan, scale) if kind == "DEEPSPEED" else []),
        *(_fsdp_section(plan) if kind == "FSDP" else []),
        f"mixed_precision: {_MIXED_PRECISION.get(plan.precision, repr('no'))}",
        "num_machines: 1",
        f"num_processes: {nproc}",
        "machine_rank: 0",
        "main_training_function: main",
        "use_cpu: false",
        "debug: false",
    ]
    return "\n".join([*lines, *notes]) + "\n"


def _deepspeed_section(plan: Plan, scale: Scale | None) -> list[str]:
    settings = [
        f"zero_stage: {stage_of(plan, scale)}",
        *_tier(plan, Offloaded.OPTIMIZER, "offload_optimizer"),
        *_tier(plan, Offloaded.PARAMS, "offload_param"),
        f"gradient_accumulation_steps: {plan.accumulation}",
        "gradient_clipping: 1.0e+9  # your loop's norm; unsaid, and at 0, Accelerate leaves it to DeepSpeed, which clips at 1",
        "zero3_init_flag: false",
    ]
    return ["deepspeed_config:", *indent(settings, 2)]


def _fsdp_section(plan: Plan) -> list[str]:
    settings = [
        "fsdp_version: 2",
        "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP  # the blocks a model of transformers names in _no_split_modules",
        "fsdp_reshard_after_forward: true",
        f"fsdp_offload_params: {str(offloads_model_states(plan)).lower()}",
        "fsdp_activation_checkpointing: false  # accelerate's own draws other dropout masks when it recomputes",
        "fsdp_cpu_ram_efficient_loading: false",
        "fsdp_state_dict_type: SHARDED_STATE_DICT",
    ]
    return ["fsdp_config:", *indent(settings, 2)]


def _tier(plan: Plan, what: Offloaded, name: str) -> list[str]:
    tier = plan.tier_of(what)
    if tier is Tier.DISK:
        return [f"{name}_device: nvme", f"{name}_nvme_path: nvme  # a folder on a fast disk"]
    return [f"{name}_device: {'none' if tier is None else 'cpu'}"]


def _script_notes(plan: Plan) -> list[str]:
    accumulate = plan.accumulation
    activations = plan.tier_of(Offloaded.ACTIVATIONS)
    return wanted((
        ((f"Accelerator(gradient_accumulation_steps={accumulate}), batches {accumulate} times smaller, and "
         "`with accelerator.accumulate(model):` around each; weight losses by target tokens"), accumulate > 1),
        ("checkpointing: checkpoint_blocks(model) of memlab.export(plan, to='torch') before prepare()",
         plan.checkpointing != "off" and plan.checkpointing.budget_bytes is None),
        ("checkpointing by budget: checkpoint_blocks of memlab.export(plan, to='torch'), on one of your batches",
         plan.checkpointing.budget_bytes is not None),
        ("model.float() before the optimizer is made", plan.precision is Precision.FP32),
        ('torch.set_float32_matmul_precision("high")', plan.precision is Precision.TF32),
        ("model.to(torch.bfloat16) before the optimizer is made", plan.precision is Precision.PURE_BF16),
        (f"optimizer: {one_line_optimizer(plan)}", plan.optimizer is not OptimizerChoice.KEEP),
        ("the forward pass under torch.autograd.graph.save_on_cpu(pin_memory=True)", activations is not None),
        ("activations on disk: Accelerate has nothing for files, the line above keeps them in host memory",
         activations is Tier.DISK),
        (FROZEN_STAYS, offloads_frozen(plan)),
        (" ".join(loaded_base(plan)), loaded_base(plan)),
        *((line, True) for line in by_code_of_torch(plan)),
        ("gradient release: Accelerate has nothing for it; update_in_backward in memlab.export(plan, to='torch')",
         plan.gradients is Gradients.RELEASE),
    ))  # fmt: skip
