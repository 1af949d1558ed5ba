"""Peak host memory of a piece of work, in a process of its own.

`peak`: the kernel's own high-water mark of the resident set (VmHWM), which misses nothing and needs no sampling.
`ru_maxrss` will not do: a child starts with its parent's. It counts pages of mapped files too, which the kernel can take
back without swapping. `own`: memory that it cannot take back (RssAnon), of which there is no high-water mark, so a thread looks
every half millisecond. Both are over what was there before the work began.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PROGRAM = """
import gc, json, sys, threading, time
import torch
torch.set_num_threads(1)

def resident(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))

def look():
    while not over.is_set():
        seen[0] = max(seen[0], resident("RssAnon"))
        time.sleep(0.0005)

{prepare}
gc.collect()
with open("/proc/self/clear_refs", "w") as marks:
    marks.write("5")  # the high-water mark begins anew
before, own = resident("VmRSS"), resident("RssAnon")
seen, over = [own], threading.Event()
watch = threading.Thread(target=look)
watch.start()
began = time.perf_counter()
{work}
seconds = time.perf_counter() - began
over.set()
watch.join()
print(json.dumps({{"peak": resident("VmHWM") - before, "own": seen[0] - own, "seconds": seconds}}))
"""


@dataclass(frozen=True)
class HostPeak:
    """What a piece of work took at most.

    Args:
        peak: bytes resident, mapped files included.
        own: bytes of the process's own memory, as sampled.
        seconds: how long it took.
    """

    peak: int
    own: int
    seconds: float


def can_measure() -> bool:
    """Whether the kernel tells, and lets the mark be set back."""
    return Path("/proc/self/clear_refs").exists()


def host_peak(work: str, prepare: str = "") -> HostPeak:
    """Run statements in a fresh process and measure what they take.

    Args:
        work: statements that are measured.
        prepare: statements that run before, such as imports and a first small model.
    """
    program = _PROGRAM.format(prepare=prepare, work=work)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=_ROOT)
    if result.returncode:
        raise AssertionError(result.stderr)
    return HostPeak(**json.loads(result.stdout.splitlines()[-1]))
