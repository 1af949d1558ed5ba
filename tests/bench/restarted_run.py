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
    config = GPT2Config(
        vocab_size=5000, n_embd=512, n_layer=8, n_head=8, n_positions=64, bos_token_id=0, eos_token_id=0
    )
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
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    dist.init_process_group("gloo")
    model, optimizer = loaded(folder / OUT)
    states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            entry: distribute_tensor(value, mesh, parameter.placements) if value.dim() else value
            for entry, value in states[name].items()
        }
    trained(model, optimizer, [BATCHES[2].chunk(dist.get_world_size())[dist.get_rank()]])

    def whole(value: torch.Tensor) -> torch.Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    weights = {name: whole(value) for name, value in model.state_dict().items()}
    moments = optimizer.state_dict()
    moments["state"] = {
        number: {entry: whole(value) for entry, value in state.items()} for number, state in moments["state"].items()
    }
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": moments}, folder / HOME)
    dist.barrier()
    os._exit(0)  # a thread of gloo that wants the interpreter while it ends would abort it


def loaded(path: Path) -> Made:
    """A model and an optimizer as they were saved."""
    model, optimizer = made()
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


if __name__ == "__main__":
    if "RANK" in os.environ:
        on_ranks(Path(sys.argv[1]))
    else:  # the kernel in which the loop would go on
        loaded(Path(sys.argv[1]) / HOME)
