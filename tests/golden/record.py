"""Record what the CUDA allocator does in a few training steps of a few plans.

    python -m tests.golden.record

writes ``tests/golden/<gpu>-<plan>.json.gz``: the allocator's events, its counters after each step, its settings, and
the versions they hold for.
"""

from __future__ import annotations

import gc
import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from memlab.measuring.runs import training_step
from memlab.session import fit
from tests.bench.workloads import gpt2

PLANS = ("", "--accumulate 4", "--accumulate 4 --checkpoint", "--fp16", "--adam8bit", "--offload optimizer,activations")
COUNTERS = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "requested_bytes.all.peak", "num_alloc_retries")
STEPS = 3


def record(flags: str) -> dict[str, Any]:
    """Events and counters of `STEPS` steps under a plan, from an empty cache."""
    device = torch.device("cuda")
    load = gpt2(device, batch=8, tokens=256, small=True)
    with fit(load, flags):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history(context=None, max_entries=200_000)
        try:
            counters = []
            for _ in range(STEPS):
                training_step(load)
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
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "settings": snapshot.get("allocator_settings", {}),
        "counters": counters,
        "events": events,
    }


def main() -> int:
    """Record every plan; refuse where there is no GPU."""
    if not torch.cuda.is_available():
        sys.stderr.write("recording needs a CUDA GPU: none is available here\n")
        return 1
    for flags in PLANS:
        recorded = record(flags)
        name = re.sub(r"[^a-z0-9]+", "-", f"{recorded['gpu']} {flags or 'as written'}".lower()).strip("-")
        path = Path(__file__).parent / f"{name}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(recorded).encode()))
        sys.stdout.write(f"{path.name}: {len(recorded['events'])} events\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
