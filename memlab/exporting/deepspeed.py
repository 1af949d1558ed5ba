"""DeepSpeed: the JSON file; the rest of the plan is named in its notes."""

from __future__ import annotations

import json
from typing import Any

from memlab.exporting.parts import (
    FROZEN_STAYS,
    by_code_of_torch,
    loaded_base,
    not_written,
    offloads_frozen,
    one_line_optimizer,
    stage_of,
    torchrun,
    wanted,
)
from memlab.plan import Gradients, Offloaded, OptimizerChoice, Plan, Precision, Tier
from memlab.plan.scale import Scale


def to_deepspeed(plan: Plan, scale: Scale | None = None, nproc: int = 1) -> str:
    """Return the JSON file of a plan."""
    start = [] if scale is None else [f"{torchrun(nproc)}, or deepspeed --num_gpus {nproc} train.py"]
    flags, stage = str(plan if scale is None else scale), stage_of(plan, scale)
    notes = [flags, *not_written(plan), *start, *_notes(plan)] if flags else []
    config: dict[str, Any] = {
        # JSON has no comments; DeepSpeed passes over names it does not know at this level
        **({"memlab_notes": notes} if notes else {}),
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": "auto",
        "zero_optimization": _zero(plan, stage),
        **_precision(plan),
        **_optimizer(plan, stage),
        **_checkpointing(plan),
    }
    return json.dumps(config, indent=2) + "\n"


def _zero(plan: Plan, stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    for name, what in (("offload_optimizer", Offloaded.OPTIMIZER), ("offload_param", Offloaded.PARAMS)):
        tier = plan.tier_of(what)
        if tier is Tier.DISK:
            zero[name] = {"device": "nvme", "nvme_path": "nvme", "pin_memory": True}
        elif tier is not None:
            zero[name] = {"device": "cpu", "pin_memory": True}
    return zero


def _precision(plan: Plan) -> dict[str, Any]:
    if plan.precision is Precision.FP16:
        # a loss scale of 0 means dynamic
        return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000}}
    if plan.precision is Precision.BF16:
        return {"bf16": {"enabled": True}}
    if plan.precision is Precision.PURE_BF16:
        return {"bf16": {"enabled": True, **_pure_bf16(plan)}}
    return {"fp16": {"enabled": False}, "bf16": {"enabled": False}} if plan.precision is Precision.FP32 else {}


def _pure_bf16(plan: Plan) -> dict[str, bool]:
    """Offloaded bf16 weights are updated by DeepSpeed's own AdamW only, which keeps its moments in fp32."""
    if plan.tier_of(Offloaded.OPTIMIZER) is None:
        return {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {"bf16_master_weights_and_grads": True} if plan.optimizer is OptimizerChoice.ADAMW else {}


def _optimizer(plan: Plan, stage: int) -> dict[str, Any]:
    if plan.optimizer is OptimizerChoice.ADAMW:
        parameters = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        return {"optimizer": {"type": "AdamW", "params": parameters}}
    # an optimizer of the script's own: DeepSpeed asks for leave to shard it, and to run it on the host
    own = {"zero_allow_untested_optimizer": True} if stage else {}
    return {**own, **({"zero_force_ds_cpu_optimizer": False} if plan.tier_of(Offloaded.OPTIMIZER) else {})}


def _checkpointing(plan: Plan) -> dict[str, Any]:
    if plan.checkpointing == "off" or plan.checkpointing.budget_bytes is not None:
        return {}
    offloaded = plan.tier_of(Offloaded.ACTIVATIONS) is not None
    return {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": offloaded}}


def _notes(plan: Plan) -> list[str]:
    activations, is_checkpointed = plan.tier_of(Offloaded.ACTIVATIONS), plan.checkpointing != "off"
    offloaded = plan.tier_of(Offloaded.OPTIMIZER)
    return wanted((
        ("the Trainer takes the rest from memlab.export(plan, to='trainer'); both files agree", True),
        (("activation_checkpointing serves models that call deepspeed.checkpointing; models of transformers are "
         "checkpointed by TrainingArguments(activation_checkpointing=True), gradient_checkpointing before 5.23"),
         is_checkpointed and plan.checkpointing.budget_bytes is None),
        ("checkpointing by budget: checkpoint_blocks of memlab.export(plan, to='torch'), on one of your batches",
         plan.checkpointing.budget_bytes is not None),
        ("tf32: torch.set_float32_matmul_precision('high') in the script", plan.precision is Precision.TF32),
        ("pure-bf16 with this offloaded optimizer: DeepSpeed keeps fp32 master weights; '--optim adamw' avoids it",
         plan.precision is Precision.PURE_BF16 and bool(offloaded) and plan.optimizer is not OptimizerChoice.ADAMW),
        (f"optimizer of the script: {one_line_optimizer(plan)}",
         plan.optimizer not in (OptimizerChoice.KEEP, OptimizerChoice.ADAMW)),
        ("optimizer state on disk needs libaio; offload_optimizer.nvme_path is a folder on a fast disk",
         plan.tier_of(Offloaded.OPTIMIZER) is Tier.DISK),
        ("parameters off the device: ZeRO-3 moves all of them, embeddings and head included",
         plan.tier_of(Offloaded.PARAMS) is not None),
        ("parameters on disk need libaio; offload_param.nvme_path is a folder on a fast disk",
         plan.tier_of(Offloaded.PARAMS) is Tier.DISK),
        ("activations without checkpointing: the forward pass under torch.autograd.graph.save_on_cpu",
         activations is not None and not is_checkpointed),
        ("activations on disk: DeepSpeed keeps them in host memory", activations is Tier.DISK),
        (FROZEN_STAYS, offloads_frozen(plan)),
        (" ".join(loaded_base(plan)), loaded_base(plan)),
        *((line, True) for line in by_code_of_torch(plan)),
        ("gradient release: DeepSpeed updates after the backward pass and keeps gradients until then",
         plan.gradients is Gradients.RELEASE),
    ))  # fmt: skip
