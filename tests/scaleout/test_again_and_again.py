"""Handover after handover in one process: nothing grows.

``MEMLAB_LONG=1`` makes ten of them, in turns under ZeRO-3 and FSDP2, in place of three under FSDP2.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch

from memlab import Workload, launch
from tests.helpers.needs import needs
from tests.scaleout.runs import gpt2, texts, trained

IS_LONG = bool(os.environ.get("MEMLAB_LONG"))
ENGINES = ("zero3", "fsdp2") * 5 if IS_LONG else ("fsdp2",) * 3
BATCHES = texts(2)


def held(workload: Workload, ranks: list[int]) -> dict[str, int]:
    """What this process holds, counted."""
    gc.collect()
    seen = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in seen}
    (optimizer,) = workload.optimizers
    modules = [*workload.model.modules()]
    return {
        "tensors": len(seen),
        "bytes of tensors": sum(storages.values()),
        "threads": threading.active_count(),
        "threads of the system": psutil.Process().num_threads(),
        "child processes": sum(map(_is_of_a_launch, psutil.Process().children(recursive=True))),
        "open files": psutil.Process().num_fds(),
        "temporary files": sum(1 for _ in Path(tempfile.gettempdir()).glob("memlab-*")),
        "shared memory": shared_memory(ranks),
        "hooks of modules": sum(
            len(value) for module in modules for name, value in vars(module).items() if name.endswith("_hooks")
        ),
        "hooks of the optimizer": len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks),
        "attributes of modules": sum(len(vars(module)) for module in modules),
        "variables of the environment": len(os.environ),
    }


def shared_memory(ranks: list[int]) -> int:
    """Entries of the system's shared memory that carry the number of a rank's process."""
    folder = Path("/dev/shm")
    names = [path.name for path in folder.glob("*")] if folder.exists() else []
    return sum(any(str(rank) in name for rank in ranks) for name in names)


def _is_of_a_launch(process: psutil.Process) -> bool:
    """Browsers and kernels of other tests come and go."""
    try:
        return any("memlab.scaleout" in word for word in process.cmdline())
    except psutil.Error:
        return False


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    return {what: (before[what], after[what]) for what in before if after[what] > before[what]}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engines", [pytest.param(ENGINES, marks=[needs(extra="deepspeed")] if IS_LONG else [])])
def test_nothing_grows_from_handover_to_handover(engines: tuple[str, ...]) -> None:
    workload = gpt2()
    trained(workload, BATCHES)
    counts, ranks = [], []

    def train(there: Workload) -> int:
        trained(there, BATCHES)
        return os.getpid()

    for engine in engines:
        ranks.append(launch(train, workload, f"--scale {engine}", nproc=2).value)
        counts.append(held(workload, ranks))
    # the first one brings in what stays for the life of the process: modules, caches of torch
    assert grown(counts[0], counts[-1]) == {}
    assert counts[-1]["child processes"] == 0
    assert counts[-1]["temporary files"] == 0


def test_the_count_can_fail() -> None:
    workload = gpt2()
    trained(workload, BATCHES)
    before = held(workload, [])
    kept = torch.zeros(1000)
    handle = workload.model.register_forward_hook(lambda *_: None)
    with tempfile.TemporaryFile():
        found = grown(before, held(workload, []))
    handle.remove()
    assert found.keys() >= {"tensors", "bytes of tensors", "open files", "hooks of modules"}
    assert found["bytes of tensors"][1] - found["bytes of tensors"][0] >= kept.nbytes
