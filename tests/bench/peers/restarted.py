"""A run that goes on from a checkpoint under another setting, written by hand; prints when its first step was over."""

from __future__ import annotations

import sys
import time

import torch

from tests.bench.peers.models import adamw, gpt2


def main() -> None:
    """Build, load, take a step of four micro-batches with checkpointing."""
    path, scale, device = sys.argv[1:]
    work = gpt2(scale, torch.device(device))
    optimizer = adamw(work.model)
    saved = torch.load(path, weights_only=True)
    work.model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    work.model.activation_checkpointing_enable()
    parts = work.batch_rows // 4
    for number in range(4):
        (work.model(**work.batch(number, parts)).loss / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
    if device == "cuda":
        torch.cuda.synchronize()
    print(time.time())


if __name__ == "__main__":
    main()
