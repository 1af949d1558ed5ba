"""Plain torch: a training loop with its helper functions."""

from __future__ import annotations

from memlab.exporting.parts import (
    ENABLE,
    FROZEN_STAYS,
    SELECTIVE_CONTEXT,
    adapters_config,
    block,
    header,
    indent,
    loaded_base,
    offloads_frozen,
    optimizer_helper,
    wanted,
)
from memlab.plan import Gradients, Loss, Offloaded, Plan, Precision, Tier


def to_torch(plan: Plan) -> str:
    """Return the training loop of a plan."""
    parts = [_imports(plan), optimizer_helper(plan), *_helpers(plan), _loop(plan)]
    return "\n\n\n".join(parts) + "\n"


def _imports(plan: Plan) -> str:
    on_disk = Tier.DISK in (plan.tier_of(Offloaded.OPTIMIZER), plan.tier_of(Offloaded.ACTIVATIONS))
    needed = wanted((
        ("import functools", _wraps(plan)),
        ("import itertools", plan.tier_of(Offloaded.ACTIVATIONS) is Tier.DISK),
        ("import os", plan.tier_of(Offloaded.ACTIVATIONS) is Tier.DISK),
        ("import tempfile", on_disk),
        ("", _wraps(plan) or on_disk),
        ("import torch", True),
        ("from peft import LoraConfig, inject_adapter_in_model", plan.adapters.is_on),
    ))  # fmt: skip
    return "\n".join([header(plan), *needed, *checkpoint_imports(plan)])


def checkpoint_imports(plan: Plan) -> list[str]:
    """Return what code that recomputes needs of torch."""
    is_selective = plan.checkpointing == "selective"
    names = "checkpoint, create_selective_checkpoint_contexts" if is_selective else "checkpoint"
    return wanted((
        ("from torch.utils._pytree import tree_leaves", plan.checkpointing.budget_bytes is not None),
        (f"from torch.utils.checkpoint import {names}", _recomputes(plan)),
    ))  # fmt: skip


def _wraps(plan: Plan) -> bool:
    """Return whether the code replaces forward passes of blocks or feed-forward parts."""
    return plan.checkpointing != "off" or plan.tiling > 1


def _recomputes(plan: Plan) -> bool:
    """Return whether the code checkpoints blocks, tiles or pieces of the loss."""
    return _wraps(plan) or plan.loss is Loss.CHUNKED


def _helpers(plan: Plan) -> list[str]:
    optimizer_tier, activations_tier = plan.tier_of(Offloaded.OPTIMIZER), plan.tier_of(Offloaded.ACTIVATIONS)
    helpers = (
        (COUNT_TARGETS, plan.accumulation > 1),
        (SPLIT, plan.accumulation > 1),
        (_LOSS_CHUNKED, plan.loss is Loss.CHUNKED),
        (_TILES, plan.tiling > 1),
        (_ADAPTERS.format(config=adapters_config(plan)), plan.adapters.is_on),
        (checkpoint_helper(plan), plan.checkpointing != "off"),
        (_ACTIVATIONS_ON_DISK, activations_tier is Tier.DISK),
        (_STATE_ON_HOST, optimizer_tier in (Tier.HOST, Tier.AUTO)),
        (_STATE_ON_DISK, optimizer_tier is Tier.DISK),
        (_release_helper(plan), _releases(plan) and plan.accumulation == 1),
    )
    return [code.strip("\n") for code in wanted(helpers)]


COUNT_TARGETS = '''
def count_targets(model, batch):
    """How many targets the mean loss of a batch is taken over."""
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return len(next(iter(batch.values())))
    # a causal language model predicts each next token: the first one is nobody's target
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return int((labels[..., 1:] if causal else labels).ne(-100).sum())
'''

SPLIT = '''
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
    """The loss of a causal language model in eight pieces, each computed again in the backward pass: no full logits.

    Serves models whose logits are the plain product with the output embeddings: no logit scaling
    or capping, no loss besides the cross-entropy.
    """
    batch = dict(batch)
    targets = batch.pop("labels")[..., 1:].flatten()
    head = model.get_output_embeddings()
    hidden = model.base_model(**batch).last_hidden_state[:, :-1].flatten(0, 1)

    def summed(rows, targets):
        return torch.nn.functional.cross_entropy(head(rows).float(), targets, reduction="sum")

    pieces = zip(hidden.tensor_split(8), targets.tensor_split(8))
    return sum(checkpoint(summed, *piece, use_reentrant=False) for piece in pieces) / targets.ne(-100).sum()
'''

_ADAPTERS = '''
def add_adapters(model):
    """Freeze the weights, and put adapters beside linear layers; save them by peft.get_peft_model_state_dict(model)."""
    inject_adapter_in_model({config}, model)
'''

_TILES = '''
def tile_feed_forwards(model, tiles):
    """Run feed-forward modules tile by tile, so that their wide intermediate results never exist whole.

    Serves modules that take one tensor and treat its rows alike, found by the names they have in transformers. memlab
    also casts other large layers a tile at a time under autocast, which this code leaves out.
    """
    names = ("MLP", "FFN", "FeedForward", "DenseActDense", "DenseGatedActDense")
    parts = [module for module in model.modules() if type(module).__name__.endswith(names)]
    if not parts:
        raise ValueError("no feed-forward modules in this model that are known by name: name them here")

    def tiled(forward, hidden):
        if not torch.is_grad_enabled():
            return forward(hidden)
        rows = hidden.reshape(1, -1, hidden.shape[-1]).tensor_split(tiles, 1)
        results = [checkpoint(forward, tile, use_reentrant=False) for tile in rows if tile.shape[1]]
        return torch.cat(results, 1).reshape(hidden.shape)

    for part in parts:
        part.forward = functools.partial(tiled, part.forward)
'''

_CHECKPOINT = '''
def checkpoint_blocks(model):
    """Recompute {what} in the backward pass instead of keeping them."""{context}
{enable}
    if enable is not None:
        enable({{{arguments}}})
{every}        return
    lists = [m for m in model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)) and len(m) > 1]
    if not lists:
        raise ValueError("no list of blocks in this model: name the modules to checkpoint here")
    for block in list(max(lists, key=len)){stride}:
        block.forward = functools.partial(checkpoint, block.forward, {keywords})
'''

# as its every_n_layers, which it has since 5.16
_EVERY = """\
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = number % {every} == 0
"""

_CHECKPOINT_BUDGET = '''
def checkpoint_blocks(model, budget_bytes, run):
    """Recompute as few blocks as possible, so that what blocks keep until the backward pass fits into a budget.

    `run` calls the model on a batch; no more than one block's activations are held meanwhile. The blocks that keep most
    are recomputed first, the earlier ones of equals: memlab also weighs what each costs to run again.
    """
    if hasattr(model, "config"):
        model.config.use_cache = False  # a recomputed block would fill it twice
    lists = [m for m in model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)) and len(m) > 1]
    lists = [blocks for blocks in lists if len({type(block) for block in blocks}) == 1]
    nested = {id(part) for blocks in lists for block in blocks for part in block.modules()}
    blocks = [block for blocks in lists if id(blocks) not in nested for block in blocks]
    resident = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept, inputs = [0] * len(blocks), {}

    def storages(values):
        tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
        return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}

    def measured(number, forward, *args, **kwargs):
        saved, given = {}, storages((args, kwargs))
        inputs.update(given)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.update(storages(tensor)), lambda _: None)
        with hooks:
            output = forward(*args, **kwargs)
        elsewhere = {*resident, *given, *storages(output)}
        kept[number] += sum(storage.nbytes() for address, storage in saved.items() if address not in elsewhere)
        return output

    forwards = [block.forward for block in blocks]
    for number, block in enumerate(blocks):
        block.forward = functools.partial(measured, number, block.forward)
    with torch.random.fork_rng():
        run()
    for block, forward in zip(blocks, forwards):
        block.forward = forward
    total = sum(kept) + sum(storage.nbytes() for storage in inputs.values())
    for number in sorted(range(len(blocks)), key=lambda number: -kept[number]):
        if total > budget_bytes:
            blocks[number].forward = functools.partial(checkpoint, forwards[number], use_reentrant=False)
            total -= kept[number]
    if total > budget_bytes:
        raise ValueError(f"with all {len(blocks)} blocks recomputed they still keep {total} bytes")
'''


def checkpoint_helper(plan: Plan) -> str:
    """The function that has blocks recomputed."""
    if plan.checkpointing.budget_bytes is not None:
        return _CHECKPOINT_BUDGET
    every, is_selective = plan.checkpointing.every, plan.checkpointing == "selective"
    what = "the activations of every block" if every == 1 else f"the activations of one block in {every}"
    return _CHECKPOINT.format(
        what="all activations but products and attention" if is_selective else what,
        context=SELECTIVE_CONTEXT if is_selective else "",
        arguments='"use_reentrant": False' + (', "context_fn": contexts' if is_selective else ""),
        keywords="use_reentrant=False" + (", context_fn=contexts" if is_selective else ""),
        enable=ENABLE,
        every=_EVERY.format(every=every) if every > 1 else "",
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


_RELEASE = '''
def update_in_backward(optimizers{device}):
    """Step each parameter's own optimizer as soon as its gradient is complete, and free the gradient."""

    def hook_of(optimizer):
        def update(_parameter):
{update}

        return update

    for optimizer in optimizers:
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.register_post_accumulate_grad_hook(hook_of(optimizer))
'''


def _release_helper(plan: Plan) -> str:
    update = indent([*_update(plan), "optimizer.zero_grad()"], 12)
    return _RELEASE.format(device=_device_argument(plan), update="\n".join(update))


def _device_argument(plan: Plan) -> str:
    """What `update_in_backward` takes, and is given, beside the optimizers."""
    return "" if plan.tier_of(Offloaded.OPTIMIZER) is None else ", device"


def _releases(plan: Plan) -> bool:
    """Return whether gradients go as they are used. State in one file is read and written whole."""
    return plan.gradients is Gradients.RELEASE and plan.tier_of(Offloaded.OPTIMIZER) is not Tier.DISK


def _loop(plan: Plan) -> str:
    body = [*_setup(plan), "losses = []", *_steps(plan), "return losses"]
    words = '"""Train on dicts of tensors; `model(**batch)` returns a `.loss`. Returns the loss of each batch."""'
    return "\n".join(block("def train(model, batches, lr=5e-5)", [words, *body]))


_PRECISION_SETUP: dict[Precision, list[str]] = {
    Precision.FP32: ["model.float()", 'torch.set_float32_matmul_precision("highest")'],
    Precision.TF32: ['torch.set_float32_matmul_precision("high")  # TF32 products on NVIDIA GPUs since Ampere'],
    Precision.FP16: [
        "model.float()  # master weights: gradients of fp16 parameters cannot be unscaled",
        "scaler = torch.amp.GradScaler(device.type)",
    ],
    Precision.BF16: ["model.float()  # master weights"],
    Precision.PURE_BF16: ["model.to(torch.bfloat16)  # before the optimizer: its state follows the parameters"],
}


_PARAMS_STAY = [
    "# parameters stay on the device here: streaming them takes hooks on every block. FSDP2 has it, on one process too:",
    "# fully_shard(block, offload_policy=CPUOffloadPolicy()) for each block, then for the model; its optimizer steps on",
    "# the host, where the parameters are",
]


def _setup(plan: Plan) -> list[str]:
    offloads = plan.tier_of(Offloaded.PARAMS) is not None
    lines = [*(_PARAMS_STAY if offloads else []), *([f"# {FROZEN_STAYS}"] if offloads_frozen(plan) else [])]
    lines += [f"# {line}" for line in loaded_base(plan)]
    lines += ["device = next(model.parameters()).device"]
    lines += _PRECISION_SETUP.get(plan.precision, [])
    if plan.adapters.is_on:
        lines.append("add_adapters(model)")
    if plan.tiling > 1:
        lines.append(f"tile_feed_forwards(model, {plan.tiling})")
    if plan.checkpointing != "off" and plan.checkpointing.budget_bytes is None:
        lines.append("checkpoint_blocks(model)")
    if not _releases(plan):
        return [*lines, "optimizer = make_optimizer(model, lr)", "model.train()"]
    lines += [
        "trained = [parameter for parameter in model.parameters() if parameter.requires_grad]",
        "optimizers = [make_optimizer(torch.nn.ParameterList([parameter]), lr) for parameter in trained]",
    ]
    if plan.accumulation == 1:
        lines.append(f"update_in_backward(optimizers{_device_argument(plan)})")
    return [*lines, "model.train()"]


def _steps(plan: Plan) -> list[str]:
    """The loop over batches, inside the temporary files that the plan needs."""
    step = ["batch = {name: value.to(device) for name, value in batch.items()}"]
    step += [*_budget(plan), *_gradients(plan)]
    step += [*_updates(plan), "losses.append(total)"]
    if plan.precision is Precision.PURE_BF16:
        cast = "value.bfloat16() if value.is_floating_point() else value"
        step.insert(1, f"batch = {{name: {cast} for name, value in batch.items()}}")
    loop = block("for batch in batches", step)
    is_on_disk = plan.tier_of(Offloaded.OPTIMIZER) is Tier.DISK
    return block("with tempfile.TemporaryFile() as state_file", loop) if is_on_disk else loop


def _budget(plan: Plan) -> list[str]:
    """The choice of blocks, made on the first batch, or on a part of it as they are trained."""
    if plan.checkpointing.budget_bytes is None:
        return []
    part = f"split(batch, {plan.accumulation})[0]" if plan.accumulation > 1 else "batch"
    choose = [f"checkpoint_blocks(model, {plan.checkpointing.budget_bytes}, lambda: {_call(plan, part)})"]
    autocast = _autocast(plan)
    return block("if not losses", block(f"with {autocast}", choose) if autocast else choose)


def _gradients(plan: Plan) -> list[str]:
    """Forward and backward of one batch; leaves `total`, the mean loss of the whole batch."""
    if plan.accumulation == 1:
        return _within_disk_folder(plan, [*_forward(plan, "batch"), _backward(plan, "loss"),
                                         "total = loss.item()"])  # fmt: skip
    weight = "share = count_targets(model, part) / max(1, targets)"
    empty = block("if share == 0", ["continue  # nothing to learn from, and its mean loss is not a number"])
    part = [weight, *empty, *_forward(plan, "part"), _backward(plan, "(loss * share)")]
    return [
        "targets, total = count_targets(model, batch), 0.0",
        f"for part in split(batch, {plan.accumulation}):",
        *indent(_within_disk_folder(plan, [*part, "total += loss.item() * share"]), 4),
    ]


def _within_disk_folder(plan: Plan, lines: list[str]) -> list[str]:
    is_on_disk = plan.tier_of(Offloaded.ACTIVATIONS) is Tier.DISK
    return block("with tempfile.TemporaryDirectory() as folder", lines) if is_on_disk else lines


def _forward(plan: Plan, batch: str) -> list[str]:
    contexts = ", ".join(filter(None, (_autocast(plan), _saved(plan))))
    call = [f"loss = {_call(plan, batch)}"]
    lines = block(f"with {contexts}", call) if contexts else call
    is_hidden = plan.checkpointing == "selective" and plan.tier_of(Offloaded.ACTIVATIONS)
    why = "# what selective checkpointing keeps stays on the device: torch 2.13 hides it from these hooks"
    return [why, *lines] if is_hidden else lines


def _call(plan: Plan, batch: str) -> str:
    return f"chunked_loss(model, {batch})" if plan.loss is Loss.CHUNKED else f"model(**{batch}).loss"


def _autocast(plan: Plan) -> str:
    names = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}
    name = names.get(plan.precision)
    return f"torch.autocast(device.type, torch.{name})" if name else ""


def _saved(plan: Plan) -> str:
    tier = plan.tier_of(Offloaded.ACTIVATIONS)
    if tier is None:
        return ""
    on_host = 'torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")'
    return "activations_on_disk(model, folder)" if tier is Tier.DISK else on_host


def _backward(plan: Plan, loss: str) -> str:
    scaled = f"scaler.scale({loss.strip('()')})" if plan.precision is Precision.FP16 else loss
    return f"{scaled}.backward()"


def _updates(plan: Plan) -> list[str]:
    """Return what follows the backward pass of a batch."""
    update = [*_update(plan), "optimizer.zero_grad()"]
    if not _releases(plan):
        whole = plan.gradients is Gradients.RELEASE
        return [*(["# gradients are kept: state in a file is read and written whole"] if whole else []), *update]
    if plan.accumulation == 1:
        return []
    why = "# complete only after the last micro-batch; each gradient goes as it is used"
    return [why, *block("for optimizer in optimizers", update)]


def _update(plan: Plan) -> list[str]:
    step = ["scaler.step(optimizer)", "scaler.update()"] if plan.precision is Precision.FP16 else ["optimizer.step()"]
    tier = plan.tier_of(Offloaded.OPTIMIZER)
    if tier is None:
        return step
    if tier is Tier.DISK:
        return ["read_state(optimizer, state_file)", *step, "write_state(optimizer, state_file)"]
    return ["move_state(optimizer, device)", *step, 'move_state(optimizer, "cpu")']
