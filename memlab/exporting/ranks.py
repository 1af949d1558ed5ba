"""Plain torch on many ranks: a program for torchrun, under FSDP2 or DDP."""

from __future__ import annotations

from memlab.errors import PlanError
from memlab.exporting.parts import block, header, indent, offloads_model_states, optimizer_helper, torchrun, wanted
from memlab.exporting.torch import COUNT_TARGETS, SPLIT, checkpoint_helper, checkpoint_imports
from memlab.plan import Plan, Precision
from memlab.plan.scale import Scale


def to_ranks(plan: Plan, scale: Scale, nproc: int) -> str:
    """Return the program for torchrun."""
    if plan.checkpointing.budget_bytes is not None:
        raise PlanError(
            f"--checkpoint {plan.checkpointing} on ranks: blocks are weighed by running the whole model on one device; "
            "use --checkpoint every:N"
        )
    parts = [
        _imports(scale, nproc), _YOURS, optimizer_helper(plan), COUNT_TARGETS, SPLIT,
        *([checkpoint_helper(plan)] if plan.checkpointing != "off" else []), _placed(scale), _train(scale), _MAIN,
    ]  # fmt: skip
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def _imports(scale: Scale, nproc: int) -> str:
    plan = scale.plan
    used = ", ".join(wanted((
        ("CPUOffloadPolicy", offloads_model_states(plan)),
        ("MixedPrecisionPolicy", plan.precision is Precision.BF16),
        ("fully_shard", True),
    )))  # fmt: skip
    lines = [
        header(scale),
        f"# {torchrun(nproc)}",
        *(["import functools"] if plan.checkpointing != "off" else []),
        "import os",
        "",
        "import torch",
        "import torch.distributed as dist",
        *(_FSDP2_IMPORTS.format(used=used) if scale.engine == "fsdp2" else _DDP_IMPORTS).strip("\n").splitlines(),
        *checkpoint_imports(plan),
    ]
    return "\n".join(lines)


_FSDP2_IMPORTS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import {used}
"""

_DDP_IMPORTS = "from torch.nn.parallel import DistributedDataParallel"

_YOURS = '''
def make_model():
    """Your model, with the same weights on every rank. Here: a small GPT-2 with random ones."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 32}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return GPT2LMHeadModel(config)


def make_batches():
    """Your batches: dicts of tensors, whole and in the same order on every rank. Here: counting from anywhere."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        tokens = (torch.randint(0, 128, (8, 1), generator=generator) + torch.arange(32)) % 128
        yield {"input_ids": tokens, "labels": tokens}
'''


def _placed(scale: Scale) -> str:
    if scale.engine == "ddp":
        return _DDP
    policies = ['"mesh": mesh']
    if scale.plan.precision is Precision.BF16:
        policies.append('"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)')
    if offloads_model_states(scale.plan):
        policies.append('"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")')
    return _FSDP2.format(policies="\n".join(f"        {policy}," for policy in policies))


_DDP = '''
def placed(model, device):
    """The model on a rank's device, its gradients averaged over ranks while the backward pass runs."""
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model.to(device), device_ids=ids)
'''

_FSDP2 = '''
def placed(model, device):
    """The model in shards: each block by itself, so that one at a time is whole, then what is left.

    Make the optimizer after this: parameters are other objects now, and one from before would step the old ones.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policies = {{
{policies}
    }}
    lists = [m for m in model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)) and len(m) > 1]
    # blocks that share parameters with the rest of the model have to stay with it: name your blocks here instead
    for block in max(lists, key=len, default=[]):
        if any(True for _ in block.parameters()):
            fully_shard(block, **policies)
    return fully_shard(model, **policies)
'''


def _train(scale: Scale) -> str:
    plan = scale.plan
    precision = {Precision.FP32: ["model.float()"], Precision.BF16: ["model.float()  # master weights"]}
    matmul = {Precision.FP32: "highest", Precision.TF32: "high"}.get(plan.precision)
    setup = [
        *([f'torch.set_float32_matmul_precision("{matmul}")'] if matmul else []),
        *precision.get(plan.precision, []),
        *(["checkpoint_blocks(model)"] if plan.checkpointing != "off" else []),
    ]
    is_cast = scale.engine == "ddp" and plan.precision is Precision.BF16
    call = ["output = model(**part)"]
    if is_cast:
        call = block("with torch.autocast(device.type, torch.bfloat16)", call)
    return _TRAIN.format(
        setup="".join(f"    {line}\n" for line in setup),
        parts=plan.accumulation,
        call="\n".join(indent(call, 12)),
        inner="model.module" if scale.engine == "ddp" else "model",
    )


_TRAIN = '''
def train(model, batches, lr=5e-5):
    """Train each rank on its rows of every batch; returns the loss of each whole batch.

    Ranks average their gradients. A part counts by its share of the targets, times the number of ranks, so that the
    average is the gradient of the whole batch.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = device_of(rank)
{setup}    model = placed(model, device)
    optimizer = make_optimizer(model, lr)
    model.train()
    losses = []
    for batch in batches:
        batch = {{name: value.to(device) for name, value in batch.items()}}
        targets = count_targets({inner}, batch)
        rows = split(batch, ranks)[rank]
        total = torch.zeros((), device=device)
        for part in split(rows, {parts}):
            share = count_targets({inner}, part) / max(1, targets)
{call}
            # a mean over no targets is not a number; the part is run all the same, since the other ranks wait for it
            loss = output.loss * share if share else output.logits.sum() * 0
            (loss * ranks).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses
'''

_MAIN = '''
def device_of(rank):
    """The device of a rank: its GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))


def main():
    rank = int(os.environ["RANK"])
    device = device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # what is kept in host memory is reduced by gloo
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    losses = train(make_model(), make_batches())
    if rank == 0:
        print(losses, flush=True)
    dist.destroy_process_group()
    if device.type == "cpu":
        os._exit(0)  # a thread of gloo that wants the interpreter while it ends would abort it


if __name__ == "__main__":
    main()
'''
