"""Record what the CUDA allocator does in a few training steps of a few plans.

    python -m tests.golden.record

writes ``tests/golden/<gpu>-<plan>.json.gz``: the allocator's events from the first request of the process on, its
counters after each step, its settings, and the versions they hold for. Each plan is recorded in a process of its
own, whose allocator has served nothing before.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from memlab.measuring.runs import training_step
from memlab.session import fit
from tests.bench.workloads import gpt2
from tests.emulated_gpu.unvalued import IS_EMULATED, without_judgement
from tests.helpers.environment import with_path

PLANS = ("", "--accumulate 4", "--accumulate 4 --checkpoint", "--fp16", "--adam8bit", "--offload optimizer,activations")
COUNTERS = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "requested_bytes.all.peak", "num_alloc_retries")
STEPS = 3
FOLDER = Path(__file__).parent
_ROOT = FOLDER.parents[1]
_MOST_EVENTS = 1_000_000


def record(flags: str) -> dict[str, Any]:
    """Events and counters of `STEPS` steps under a plan, in a process of their own."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.golden.record", f"--only={flags}"],
        stdout=subprocess.PIPE,
        cwd=_ROOT,
        env=with_path(_ROOT),
    ) as process:
        assert process.stdout is not None
        written = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"recording {flags or 'as written'} ended with status {process.returncode}")
    recorded: dict[str, Any] = json.loads(gzip.decompress(written))
    return recorded


def record_here(flags: str) -> dict[str, Any]:
    """The same in this process, which must not have used the GPU."""
    if torch.cuda.memory_reserved():
        raise RuntimeError("this process has used the GPU already: what it reserved would be missing from the events")
    torch.cuda.memory._record_memory_history(context=None, max_entries=_MOST_EVENTS)
    try:
        load = gpt2(torch.device("cuda"), batch=8, tokens=256, small=True)
        counters = []
        with without_judgement(), fit(load, flags):
            for _ in range(STEPS):
                training_step(load)
                torch.cuda.synchronize()
                stats = torch.cuda.memory_stats()
                counters.append({name: stats[name] for name in COUNTERS})
            snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    events = [
        [event["action"], event.get("addr", 0), event["size"], event["stream"]]
        for event in snapshot["device_traces"][torch.cuda.current_device()]
    ]
    return {
        "plan": flags,
        "gpu": ("emulated " if IS_EMULATED else "") + torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "settings": os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")),
        "counters": counters,
        "events": events,
    }


def write(recorded: dict[str, Any]) -> Path:
    """Write a recording beside the others."""
    words = f"{recorded['gpu']} {recorded['plan'] or 'as written'} {recorded['settings']}"
    name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    path = FOLDER / f"{name}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(recorded).encode(), mtime=0))
    return path


def read(path: Path) -> dict[str, Any]:
    """A recording."""
    recorded: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return recorded


def recordings() -> list[Path]:
    """All recordings in the repository."""
    return sorted(FOLDER.glob("*.json.gz"))


def main() -> int:
    """Record every plan; refuse where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description=__doc__)
    parser.add_argument("--only", metavar="FLAGS", help="one plan, in this process, to standard output")
    only = parser.parse_args().only
    if not torch.cuda.is_available():
        sys.stderr.write("recording needs a CUDA GPU: none is available here\n")
        return 1
    if only is not None:
        sys.stdout.buffer.write(gzip.compress(json.dumps(record_here(only)).encode()))
        return 0
    for flags in PLANS:
        recorded = record(flags)
        path = write(recorded)
        sys.stdout.write(f"{path.name}: {len(recorded['events'])} events\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
