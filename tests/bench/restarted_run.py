"""A run that goes on from a checkpoint by hand: on ranks under FSDP2, or, started alone, in a new kernel.

    torchrun --nproc-per-node 2 -m tests.bench.restarted_run FOLDER
    python -m tests.bench.restarted_run FOLDER

Ranks load what lies in the folder, take one step and save; a kernel loads that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

ROOT = Path(__file__).parents[2]
OUT, HOME = "out.pt", "home.pt"
BATCHES = [torch.randint(0, 1000, (8, 64), generator=torch.Generator().manual_seed(step)) for step in range(3)]
Made = tuple[GPT2LMHeadModel, torch.optim.Optimizer]


def made() -> Made:
    """A GPT-2 of 28 million parameters: 0.3 GiB with its moments."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=5000, n_embd=512, n_layer=8, n_head=8, n_positions=64)
    model = GPT2LMHeadModel(config).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor]) -> list[float]:
    """The loop; losses."""
    losses = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_ranks(folder: Path) -> None:
    """Load, shard, take a step on this rank's rows, save."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model, optimizer = made()
    saved = torch.load(folder / OUT, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_state_dict(model, optimizer, options=whole)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=whole)
    trained(model, optimizer, [BATCHES[2].chunk(dist.get_world_size())[dist.get_rank()]])
    weights, moments = get_state_dict(model, optimizer, options=whole)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": moments}, folder / HOME)
    dist.barrier()
    os._exit(0)  # a thread of gloo that wants the interpreter while it ends would abort it


def in_a_new_kernel(folder: Path) -> None:
    """Build and load; the loop would go on here."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model, optimizer = made()
    saved = torch.load(folder / HOME, weights_only=True)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


if __name__ == "__main__":
    (on_ranks if "RANK" in os.environ else in_a_new_kernel)(Path(sys.argv[1]))
