"""Exported DeepSpeed configurations start a real engine that trains, on the CPU, in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PLANS = ["--accumulate 4 --checkpoint", "--accumulate 2 --bf16"]
if os.environ.get("MEMLAB_LONG"):  # DeepSpeed compiles its Adam for these, which takes minutes
    PLANS += ["--accumulate 2 --bf16 --optim adamw", "--bf16 --offload optimizer"]
ROWS = 2

ENGINE = textwrap.dedent(
    """
    import importlib, json, sys
    import deepspeed, torch
    from memlab.plan import Plan
    from tests.helpers.cpu_ranks import without_compiling
    from tests.techniques.models import gpt2, ragged_batch

    without_compiling()

    VALUES = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
              "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}

    def filled(config):
        # what the Trainer puts in for "auto"
        return {key: filled(value) if isinstance(value, dict) else VALUES[key] if value == "auto" else value
                for key, value in config.items()}

    export = importlib.import_module("memlab").export
    deepspeed.init_distributed("gloo")
    batch = ragged_batch(vocabulary=64)
    for flags in json.loads(sys.argv[1]):
        config = json.loads(export(Plan.parse(flags), "deepspeed"))
        config["train_batch_size"] = 2 * config["gradient_accumulation_steps"]
        config, model = filled(config), gpt2(vocabulary=64)
        own = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), 1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=config,
                                          model_parameters=None if own else model.parameters())
        losses = []
        for start in (0, 2, 4, 6) * 2:
            loss = engine(**{key: value[start:start + 2] for key, value in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        print("RESULT", json.dumps([flags, sum(losses[:4]), sum(losses[-4:])]))
        engine.destroy()
    """
)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_deepspeed_engines_train_with_the_exported_configurations(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        # DeepSpeed compiles its Adam, and in the user's cache it would wait for a lock that an ended build has left
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    run = subprocess.run(
        [sys.executable, "-c", ENGINE, json.dumps(PLANS)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results = [json.loads(line.split(" ", 1)[1]) for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert [flags for flags, _, _ in results] == PLANS
    assert all(last < first for _, first, last in results)
