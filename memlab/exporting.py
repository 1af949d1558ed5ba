"""A plan as code: the same techniques, written out for a script that does not use memlab.

Each target is a list of parts; a part is printed only when the plan needs it, so the empty plan
prints the plain thing. What a target cannot express is said in its output, never dropped.

Known limitations: the torch target serves models whose call returns an object with a `loss`; its
chunked loss serves causal language models with a plain linear head.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from memlab.errors import PlanError
from memlab.plan import Loss, Offloaded, OptimizerChoice, Plan, Precision, Tier


def export(plan: Plan, to: str) -> str:
    """Print a plan as code or as a configuration file.

    Args:
        plan: the techniques to write down.
        to: "torch" (a training loop), "trainer" (TrainingArguments), "accelerate" (a YAML file for
            `accelerate launch --config_file`) or "deepspeed" (a JSON file).

    Returns:
        Text that runs, or loads, as it stands.

    Raises:
        PlanError: an unknown target.

    Example:
        >>> print(export(Plan.parse("--accumulate 4 --adam8bit"), to="trainer"))  # doctest: +ELLIPSIS
        # memlab plan: --accumulate 4 --adam8bit
        from transformers import TrainingArguments
        ...
    """
    if to not in _TARGETS:
        raise PlanError(f"export to {to!r}: allowed are {', '.join(_TARGETS)}")
    return _TARGETS[to](plan)


def _header(plan: Plan) -> str:
    return f"# memlab plan: {str(plan) or 'none, as written'}"


def _indent(lines: list[str], spaces: int) -> list[str]:
    return [" " * spaces + line if line else line for line in lines]


def _every(plan: Plan) -> int:
    """One block in how many is checkpointed."""
    return int(plan.checkpointing.partition(":")[2] or 1)


# --- plain torch -----------------------------------------------------------------------------------


def _torch(plan: Plan) -> str:
    parts = [_torch_imports(plan), _torch_optimizer(plan), *_torch_helpers(plan), _torch_loop(plan)]
    return "\n\n\n".join(parts) + "\n"


def _torch_imports(plan: Plan) -> str:
    on_disk = Tier.DISK in dict(plan.offload).values()
    needed = (
        ("import functools", plan.checkpointing != "off"),
        ("import itertools", plan.tier_of(Offloaded.ACTIVATIONS) is Tier.DISK),
        ("import os", plan.tier_of(Offloaded.ACTIVATIONS) is Tier.DISK),
        ("import tempfile", on_disk),
        ("", plan.checkpointing != "off" or on_disk),
        ("import torch", True),
        ("from torch.utils.checkpoint import checkpoint", plan.checkpointing not in ("off", "selective")),
        (
            "from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts",
            plan.checkpointing == "selective",
        ),
    )
    return "\n".join([_header(plan), *(line for line, wanted in needed if wanted)])


# choice -> (import inside the function, the call)
_TORCH_OPTIMIZERS = {
    OptimizerChoice.KEEP: ("", "torch.optim.AdamW(model.parameters(), lr=lr)"),
    OptimizerChoice.ADAMW: ("", "torch.optim.AdamW(model.parameters(), lr=lr)"),
    OptimizerChoice.ADAM8BIT: ("import bitsandbytes", "bitsandbytes.optim.AdamW8bit(model.parameters(), lr=lr)"),
    OptimizerChoice.PAGED_ADAM8BIT: (
        "import bitsandbytes",
        "bitsandbytes.optim.PagedAdamW8bit(model.parameters(), lr=lr)",
    ),
    OptimizerChoice.ADAFACTOR: (
        "from transformers.optimization import Adafactor",
        "Adafactor(model.parameters(), lr=lr, scale_parameter=False, relative_step=False, warmup_init=False)",
    ),
    OptimizerChoice.SGD: ("", "torch.optim.SGD(model.parameters(), lr=lr)"),
}


def _torch_optimizer(plan: Plan) -> str:
    package, call = _TORCH_OPTIMIZERS[plan.optimizer]
    comment = ["# the plan keeps your optimizer: put it here"] if plan.optimizer is OptimizerChoice.KEEP else []
    body = [*([package, ""] if package else []), *comment, f"return {call}"]
    return "\n".join(["def make_optimizer(model, lr):", *_indent(body, 4)])


def _torch_helpers(plan: Plan) -> list[str]:
    optimizer_tier, activations_tier = plan.tier_of(Offloaded.OPTIMIZER), plan.tier_of(Offloaded.ACTIVATIONS)
    helpers = (
        (_COUNT_TARGETS, plan.accumulation > 1),
        (_SPLIT, plan.accumulation > 1),
        (_LOSS_CHUNKED, plan.loss is Loss.CHUNKED),
        (_torch_checkpointing(plan), plan.checkpointing != "off"),
        (_ACTIVATIONS_ON_DISK, activations_tier is Tier.DISK),
        (_STATE_ON_HOST, optimizer_tier in (Tier.HOST, Tier.AUTO)),
        (_STATE_ON_DISK, optimizer_tier is Tier.DISK),
    )
    return [code.strip("\n") for code, wanted in helpers if wanted]


_COUNT_TARGETS = '''
def count_targets(model, batch):
    """How many targets the mean loss of a batch is taken over."""
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return len(next(iter(batch.values())))
    # a causal language model predicts each next token: the first one is nobody's target
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return int((labels[..., 1:] if causal else labels).ne(-100).sum())
'''

_SPLIT = '''
def split(batch, parts):
    """Cut the rows of a batch into micro-batches; what has no rows goes to each of them."""
    rows = len(batch.get("labels", next(iter(batch.values()))))
    cut = {
        name: value.tensor_split(min(parts, rows)) if value.dim() and len(value) == rows else [value] * parts
        for name, value in batch.items()
    }
    return [dict(zip(cut, values)) for values in zip(*cut.values())]
'''

_LOSS_CHUNKED = '''
def chunked_loss(model, batch):
    """The loss of a causal language model without its full logits (torch 2.13 or newer).

    Serves models whose logits are the plain product with the output embeddings: no logit scaling
    or capping, no loss besides the cross-entropy.
    """
    batch = dict(batch)
    targets = batch.pop("labels")[..., 1:].flatten()
    head = model.get_output_embeddings()
    hidden = model.base_model(**batch).last_hidden_state[:, :-1].flatten(0, 1)
    # in the number format of the weights: a half-precision head would lose the small gradients
    return torch.nn.functional.linear_cross_entropy(
        hidden.to(head.weight.dtype),
        head.weight,
        targets,
        linear_bias=head.bias,
        options=torch.nn.LinearCrossEntropyOptions(),
    )
'''

_CHECKPOINT = '''
def checkpoint_blocks(model):
    """Recompute {what} in the backward pass instead of keeping them."""{context}
    # transformers ≥ 5.23, else its older name, else a model that is not of transformers
    enable = getattr(model, "activation_checkpointing_enable", getattr(model, "gradient_checkpointing_enable", None))
    if enable is not None:
        enable({{{arguments}}}{every})
        return
    lists = [m for m in model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)) and len(m) > 1]
    if not lists:
        raise ValueError("no list of blocks in this model: name the modules to checkpoint here")
    for block in list(max(lists, key=len)){stride}:
        block.forward = functools.partial(checkpoint, block.forward, {keywords})
'''

_SELECTIVE_CONTEXT = """
    aten = torch.ops.aten
    kept = [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)"""


def _torch_checkpointing(plan: Plan) -> str:
    every, is_selective = _every(plan), plan.checkpointing == "selective"
    what = "the activations of every block" if every == 1 else f"the activations of one block in {every}"
    return _CHECKPOINT.format(
        what="all activations but products and attention" if is_selective else what,
        context=_SELECTIVE_CONTEXT if is_selective else "",
        arguments='"use_reentrant": False' + (', "context_fn": contexts' if is_selective else ""),
        keywords="use_reentrant=False" + (", context_fn=contexts" if is_selective else ""),
        every=f", every_n_layers={every}" if every > 1 else "",
        stride=f"[::{every}]" if every > 1 else "",
    )


_ACTIVATIONS_ON_DISK = '''
def activations_on_disk(model, folder, numbers=itertools.count()):
    """Write what autograd saves to files; parameters stay, they are in memory anyway."""
    resident = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() in resident:
            return tensor
        path = os.path.join(folder, f"{next(numbers)}.pt")
        torch.save(tensor.detach().clone(), path)
        return path

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else torch.load(packed)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
'''

_STATE_ON_HOST = '''
def move_state(optimizer, device):
    """Move the moments between device and host; step counters are single numbers and stay."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = value.to(device)
'''

_STATE_ON_DISK = '''
def write_state(optimizer, file):
    """Write the moments to a file and free them."""
    file.seek(0)
    torch.save(list(optimizer.state.values()), file)
    for state in optimizer.state.values():
        state.clear()


def read_state(optimizer, file):
    """Read the moments back, each to the device it came from."""
    if optimizer.state:
        file.seek(0)
        for state, saved in zip(optimizer.state.values(), torch.load(file)):
            state.update(saved)
'''


def _torch_loop(plan: Plan) -> str:
    body = [*_torch_setup(plan), "losses = []", *_torch_steps(plan), "return losses"]
    words = '    """Train on dicts of tensors; `model(**batch)` returns a `.loss`. Returns the loss of each batch."""'
    head = ["def train(model, batches, lr=5e-5):", words]
    return "\n".join([*head, *_indent(body, 4)])


_TORCH_PRECISION_SETUP: dict[Precision, list[str]] = {
    Precision.KEEP: [],
    Precision.FP32: ["model.float()", 'torch.set_float32_matmul_precision("highest")'],
    Precision.TF32: ['torch.set_float32_matmul_precision("high")  # TF32 products on NVIDIA GPUs since Ampere'],
    Precision.FP16: [
        "model.float()  # master weights: gradients of fp16 parameters cannot be unscaled",
        "scaler = torch.amp.GradScaler(device.type)",
    ],
    Precision.BF16: ["model.float()  # master weights"],
    Precision.PURE_BF16: ["model.to(torch.bfloat16)  # before the optimizer: its state follows the parameters"],
}


def _torch_setup(plan: Plan) -> list[str]:
    lines = ["device = next(model.parameters()).device", *_TORCH_PRECISION_SETUP[plan.precision]]
    if plan.checkpointing != "off":
        lines.append("checkpoint_blocks(model)")
    return [*lines, "optimizer = make_optimizer(model, lr)", "model.train()"]


def _torch_steps(plan: Plan) -> list[str]:
    """The loop over batches, inside the temporary files that the plan needs."""
    step = ["batch = {name: value.to(device) for name, value in batch.items()}", *_torch_gradients(plan)]
    step += [*_torch_update(plan), "optimizer.zero_grad()", "losses.append(total)"]
    if plan.precision is Precision.PURE_BF16:
        cast = "value.bfloat16() if value.is_floating_point() else value"
        step.insert(1, f"batch = {{name: {cast} for name, value in batch.items()}}")
    loop = ["for batch in batches:", *_indent(step, 4)]
    if plan.tier_of(Offloaded.OPTIMIZER) is Tier.DISK:
        loop = ["with tempfile.TemporaryFile() as state_file:", *_indent(loop, 4)]
    return loop


def _torch_gradients(plan: Plan) -> list[str]:
    """Forward and backward of one batch; leaves `total`, the mean loss of the whole batch."""
    if plan.accumulation == 1:
        return _torch_disk_folder(plan, [*_torch_forward(plan, "batch"), *_torch_backward(plan, "loss"),
                                         "total = loss.item()"])  # fmt: skip
    weight = "share = count_targets(model, part) / max(1, targets)"
    empty = ["if share == 0:", "    continue  # nothing to learn from, and its mean loss is not a number"]
    part = [weight, *empty, *_torch_forward(plan, "part"), *_torch_backward(plan, "(loss * share)")]
    return [
        "targets, total = count_targets(model, batch), 0.0",
        f"for part in split(batch, {plan.accumulation}):",
        *_indent(_torch_disk_folder(plan, [*part, "total += loss.item() * share"]), 4),
    ]


def _torch_disk_folder(plan: Plan, lines: list[str]) -> list[str]:
    if plan.tier_of(Offloaded.ACTIVATIONS) is not Tier.DISK:
        return lines
    return ["with tempfile.TemporaryDirectory() as folder:", *_indent(lines, 4)]


def _torch_forward(plan: Plan, batch: str) -> list[str]:
    call = f"chunked_loss(model, {batch})" if plan.loss is Loss.CHUNKED else f"model(**{batch}).loss"
    contexts = [context for context in (_torch_autocast(plan), _torch_saved(plan)) if context]
    lines = [f"loss = {call}"]
    if contexts:
        lines = [f"with {', '.join(contexts)}:", *_indent(lines, 4)]
    return [*_selective_offload_comment(plan), *lines]


def _selective_offload_comment(plan: Plan) -> list[str]:
    if plan.checkpointing == "selective" and plan.tier_of(Offloaded.ACTIVATIONS):
        return ["# what selective checkpointing keeps stays on the device: torch 2.13 hides it from these hooks"]
    return []


def _torch_autocast(plan: Plan) -> str:
    names = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}
    name = names.get(plan.precision)
    return f"torch.autocast(device.type, torch.{name})" if name else ""


def _torch_saved(plan: Plan) -> str:
    tier = plan.tier_of(Offloaded.ACTIVATIONS)
    if tier is None:
        return ""
    on_host = 'torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")'
    return "activations_on_disk(model, folder)" if tier is Tier.DISK else on_host


def _torch_backward(plan: Plan, loss: str) -> list[str]:
    scaled = f"scaler.scale({loss.strip('()')})" if plan.precision is Precision.FP16 else loss
    return [f"{scaled}.backward()"]


def _torch_update(plan: Plan) -> list[str]:
    step = ["scaler.step(optimizer)", "scaler.update()"] if plan.precision is Precision.FP16 else ["optimizer.step()"]
    tier = plan.tier_of(Offloaded.OPTIMIZER)
    if tier is None:
        return step
    if tier is Tier.DISK:
        return ["read_state(optimizer, state_file)", *step, "write_state(optimizer, state_file)"]
    return ["move_state(optimizer, device)", *step, 'move_state(optimizer, "cpu")']


# --- transformers.Trainer --------------------------------------------------------------------------

_TRAINER_OPTIMIZERS = {
    OptimizerChoice.ADAMW: "adamw_torch",
    OptimizerChoice.ADAM8BIT: "adamw_bnb_8bit",
    OptimizerChoice.PAGED_ADAM8BIT: "paged_adamw_8bit",
    OptimizerChoice.ADAFACTOR: "adafactor",
    OptimizerChoice.SGD: "sgd",
}
_TRAINER_PRECISION: dict[Precision, list[str]] = {
    Precision.KEEP: [],
    Precision.FP32: ["fp16=False,", "bf16=False,", "tf32=False,"],
    Precision.TF32: ["tf32=True,"],
    Precision.FP16: ["fp16=True,"],
    Precision.BF16: ["bf16=True,"],
    Precision.PURE_BF16: [],
}
_ACCUMULATION_COMMENT = """
# Some models take **kwargs and ignore num_items_in_batch (BertForSequenceClassification is one). Trainer 5.23 then
# adds up the losses of the micro-batches instead of averaging them: gradients are {n} times too large. For them:
# trainer.loss_is_scaled_for_ga = False"""


def _trainer(plan: Plan) -> str:
    names = "Trainer, TrainingArguments" if plan.tier_of(Offloaded.ACTIVATIONS) else "TrainingArguments"
    imports = [*_trainer_imports(plan), f"from transformers import {names}"]
    arguments = "\n".join([_header(plan), *imports, "", *_trainer_arguments(plan)])
    return "\n\n\n".join([arguments, *_trainer_notes(plan)]) + "\n"


def _trainer_imports(plan: Plan) -> list[str]:
    is_selective = plan.checkpointing == "selective"
    needs_torch = is_selective or plan.precision is Precision.PURE_BF16 or plan.tier_of(Offloaded.ACTIVATIONS)
    lines = [
        ("import functools\n", is_selective),
        ("import torch", needs_torch),
        ("from torch.utils.checkpoint import create_selective_checkpoint_contexts", is_selective),
    ]
    return [line for line, wanted in lines if wanted]


def _trainer_arguments(plan: Plan) -> list[str]:
    batch = ["batch_size = 8  # as you train today"] if plan.accumulation > 1 else []
    arguments = ['output_dir="out",']
    if plan.accumulation > 1:
        arguments.append(f"per_device_train_batch_size=max(1, batch_size // {plan.accumulation}),")
        arguments.append(f"gradient_accumulation_steps={plan.accumulation},")
    if plan.checkpointing not in ("off", "selective"):
        every = f', "every_n_layers": {_every(plan)}' if _every(plan) > 1 else ""
        arguments.append("activation_checkpointing=True,  # gradient_checkpointing before transformers 5.23")
        arguments.append(f'activation_checkpointing_kwargs={{"use_reentrant": False{every}}},')
    arguments += _TRAINER_PRECISION[plan.precision]
    if plan.optimizer in _TRAINER_OPTIMIZERS:
        arguments.append(f'optim="{_TRAINER_OPTIMIZERS[plan.optimizer]}",')
    return [*batch, "args = TrainingArguments(", *_indent(arguments, 4), ")"]


def _trainer_notes(plan: Plan) -> list[str]:
    """What TrainingArguments has no argument for: code where a few lines do it, else the way round."""
    notes = (
        (_ACCUMULATION_COMMENT.format(n=plan.accumulation), plan.accumulation > 1),
        (_TRAINER_WEIGHTS, plan.precision in (Precision.FP32, Precision.FP16, Precision.BF16)),
        (_TRAINER_SELECTIVE, plan.checkpointing == "selective"),
        (_TRAINER_PURE_BF16, plan.precision is Precision.PURE_BF16),
        (_trainer_activations(plan), plan.tier_of(Offloaded.ACTIVATIONS) is not None),
        (_TRAINER_STATE, plan.tier_of(Offloaded.OPTIMIZER) is not None),
        (_TRAINER_LOSS, plan.loss is Loss.CHUNKED),
    )
    return [text.strip("\n") for text, wanted in notes if wanted]


_TRAINER_SELECTIVE = f'''

def checkpoint_blocks(model):
    """TrainingArguments takes no functions: call this before Trainer(model=model, args=args)."""{_SELECTIVE_CONTEXT}
    model.activation_checkpointing_enable({{"use_reentrant": False, "context_fn": contexts}})
'''

_TRAINER_PURE_BF16 = '''

def to_bf16(model):
    """bf16=True would keep fp32 weights: call this before Trainer(model=model, args=args) instead."""
    return model.to(torch.bfloat16)
'''

_TRAINER_ACTIVATIONS = '''

class OffloadingTrainer(Trainer):
    """Use it in place of Trainer: TrainingArguments offloads only what checkpointing keeps."""{disk}

    def compute_loss(self, *args, **kwargs):
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return super().compute_loss(*args, **kwargs)
'''

_TRAINER_WEIGHTS = """
# These arguments leave the weights in the format they were loaded in, and this plan wants them in fp32:
# from_pretrained(..., dtype=torch.float32), or model.float() before Trainer(model=model, args=args)"""

_TRAINER_STATE = """
# TrainingArguments cannot offload optimizer state on one device. Pass it the DeepSpeed file of this plan:
# TrainingArguments(..., deepspeed="deepspeed.json"), with deepspeed.json from memlab.export(plan, to="deepspeed")"""

_TRAINER_LOSS = """
# TrainingArguments cannot chunk the loss by itself. use_liger_kernel=True does it for the models Liger knows
# (CUDA, pip install liger-kernel); for others see chunked_loss in memlab.export(plan, to="torch")"""


def _trainer_activations(plan: Plan) -> str:
    disk = "\n\n    # the plan says disk: Trainer has nothing for files, this keeps the activations in host memory"
    return _TRAINER_ACTIVATIONS.format(disk=disk if plan.tier_of(Offloaded.ACTIVATIONS) is Tier.DISK else "")


# --- accelerate ------------------------------------------------------------------------------------

_MIXED_PRECISION = {Precision.FP16: "fp16", Precision.BF16: "bf16"}


def _accelerate(plan: Plan) -> str:
    is_deepspeed = plan.tier_of(Offloaded.OPTIMIZER) is not None
    lines = [
        _header(plan),
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
    is_disk = plan.tier_of(Offloaded.OPTIMIZER) is Tier.DISK
    nvme = ["offload_optimizer_device: nvme", "offload_optimizer_nvme_path: nvme  # a folder on a fast disk"]
    tier = nvme if is_disk else ["offload_optimizer_device: cpu"]
    settings = [
        f"zero_stage: {_zero_stage(plan)}",
        *tier,
        "offload_param_device: none",
        f"gradient_accumulation_steps: {plan.accumulation}",
        "zero3_init_flag: false",
    ]
    return ["deepspeed_config:", *_indent(settings, 2)]


def _accelerate_notes(plan: Plan) -> list[str]:
    notes = _script_notes(plan)
    return ["# The rest of the plan belongs into the script:", *(f"# - {note}" for note in notes)] if notes else []


def _script_notes(plan: Plan) -> list[str]:
    accumulate, every = plan.accumulation, _every(plan)
    kwargs = f", every_n_layers={every}" if every > 1 else ""
    enable = f'model.activation_checkpointing_enable({{"use_reentrant": False}}{kwargs})'
    context = "context_fn of create_selective_checkpoint_contexts, as in memlab.export(plan, to='torch')"
    activations = plan.tier_of(Offloaded.ACTIVATIONS)
    notes = (
        ((f"Accelerator(gradient_accumulation_steps={accumulate}), batches {accumulate} times smaller, and "
         "`with accelerator.accumulate(model):` around each; weight losses by target tokens"), accumulate > 1),
        (enable, plan.checkpointing not in ("off", "selective")),
        (f"selective checkpointing: model.activation_checkpointing_enable with {context}",
         plan.checkpointing == "selective"),
        ("model.float() before the optimizer is made", plan.precision is Precision.FP32),
        ('torch.set_float32_matmul_precision("high")', plan.precision is Precision.TF32),
        ("model.to(torch.bfloat16) before the optimizer is made", plan.precision is Precision.PURE_BF16),
        (f"optimizer: {_one_line_optimizer(plan)}", plan.optimizer is not OptimizerChoice.KEEP),
        ("the forward pass under torch.autograd.graph.save_on_cpu(pin_memory=True)", activations is not None),
        ("activations on disk: Accelerate has nothing for files, the line above keeps them in host memory",
         activations is Tier.DISK),
        ("chunked loss: chunked_loss in memlab.export(plan, to='torch')", plan.loss is Loss.CHUNKED),
    )  # fmt: skip
    return [text for text, wanted in notes if wanted]


def _one_line_optimizer(plan: Plan) -> str:
    package, call = _TORCH_OPTIMIZERS[plan.optimizer]
    return f"{call}  ({package})" if package else call


# --- DeepSpeed -------------------------------------------------------------------------------------


def _deepspeed(plan: Plan) -> str:
    notes = [*([str(plan)] if str(plan) else []), *_deepspeed_notes(plan)]
    config: dict[str, Any] = {
        # JSON has no comments; DeepSpeed passes over names it does not know at this level
        **({"memlab_notes": notes} if notes else {}),
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": "auto",
        "zero_optimization": _deepspeed_zero(plan),
        **_deepspeed_precision(plan),
        **_deepspeed_optimizer(plan),
        **_deepspeed_checkpointing(plan),
    }
    return json.dumps(config, indent=2) + "\n"


def _zero_stage(plan: Plan) -> int:
    """DeepSpeed offloads to the host from stage 2 (and keeps pure-bf16 there), to files only at stage 3."""
    tier = plan.tier_of(Offloaded.OPTIMIZER)
    if tier is Tier.DISK:
        return 3
    return 2 if tier is not None or plan.precision is Precision.PURE_BF16 else 0


def _deepspeed_zero(plan: Plan) -> dict[str, Any]:
    tier = plan.tier_of(Offloaded.OPTIMIZER)
    zero: dict[str, Any] = {"stage": _zero_stage(plan)}
    if tier is Tier.DISK:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": "nvme", "pin_memory": True}
    elif tier is not None:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return zero


def _deepspeed_precision(plan: Plan) -> dict[str, Any]:
    if plan.precision is Precision.FP16:
        # a loss scale of 0 means dynamic
        return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000}}
    if plan.precision is Precision.BF16:
        return {"bf16": {"enabled": True}}
    if plan.precision is Precision.PURE_BF16:
        return {"bf16": {"enabled": True, **_deepspeed_pure_bf16(plan)}}
    return {"fp16": {"enabled": False}, "bf16": {"enabled": False}} if plan.precision is Precision.FP32 else {}


def _deepspeed_pure_bf16(plan: Plan) -> dict[str, bool]:
    """Offloaded bf16 weights are updated by DeepSpeed's own AdamW only, which keeps its moments in fp32."""
    if plan.tier_of(Offloaded.OPTIMIZER) is None:
        return {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {"bf16_master_weights_and_grads": True} if plan.optimizer is OptimizerChoice.ADAMW else {}


def _deepspeed_optimizer(plan: Plan) -> dict[str, Any]:
    if plan.optimizer is OptimizerChoice.ADAMW:
        parameters = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        return {"optimizer": {"type": "AdamW", "params": parameters}}
    # an optimizer of the script's own: DeepSpeed asks for leave to shard it, and to run it on the host
    own = {"zero_allow_untested_optimizer": True} if _zero_stage(plan) else {}
    return {**own, **({"zero_force_ds_cpu_optimizer": False} if plan.tier_of(Offloaded.OPTIMIZER) else {})}


def _deepspeed_checkpointing(plan: Plan) -> dict[str, Any]:
    if plan.checkpointing == "off":
        return {}
    offloaded = plan.tier_of(Offloaded.ACTIVATIONS) is not None
    return {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": offloaded}}


def _deepspeed_notes(plan: Plan) -> list[str]:
    activations, is_checkpointed = plan.tier_of(Offloaded.ACTIVATIONS), plan.checkpointing != "off"
    offloaded = plan.tier_of(Offloaded.OPTIMIZER)
    notes = (
        ("the Trainer takes the rest from memlab.export(plan, to='trainer'); both files agree", True),
        (("activation_checkpointing serves models that call deepspeed.checkpointing; models of transformers are "
         "checkpointed by TrainingArguments(activation_checkpointing=True)"), is_checkpointed),
        ("tf32: torch.set_float32_matmul_precision('high') in the script", plan.precision is Precision.TF32),
        ("pure-bf16 with this offloaded optimizer: DeepSpeed keeps fp32 master weights; '--optim adamw' avoids it",
         plan.precision is Precision.PURE_BF16 and bool(offloaded) and plan.optimizer is not OptimizerChoice.ADAMW),
        (f"optimizer of the script: {_one_line_optimizer(plan)}",
         plan.optimizer not in (OptimizerChoice.KEEP, OptimizerChoice.ADAMW)),
        ("optimizer state on disk needs libaio; offload_optimizer.nvme_path is a folder on a fast disk",
         plan.tier_of(Offloaded.OPTIMIZER) is Tier.DISK),
        ("activations without checkpointing: the forward pass under torch.autograd.graph.save_on_cpu",
         activations is not None and not is_checkpointed),
        ("activations on disk: DeepSpeed keeps them in host memory", activations is Tier.DISK),
        ("chunked loss: chunked_loss in memlab.export(plan, to='torch')", plan.loss is Loss.CHUNKED),
    )  # fmt: skip
    return [text for text, wanted in notes if wanted and str(plan)]


_TARGETS: dict[str, Callable[[Plan], str]] = {
    "torch": _torch,
    "trainer": _trainer,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
}
