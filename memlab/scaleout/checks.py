"""What can be known to fail is refused before any process starts."""

from __future__ import annotations

import os
import shlex
import subprocess

import torch

from memlab.errors import RefusalError, ScaleError
from memlab.extras import require_installed
from memlab.plan import Plan
from memlab.scaleout import tensors
from memlab.scaleout.engines import tp
from memlab.scaleout.scale import Scale
from memlab.session import session_of
from memlab.workload import Workload

# DeepSpeed 0.19, runtime/swap_tensor/utils.py: MIN_AIO_BYTES, AIO_ALIGNED_BYTES
_SWAPPED_FROM_BYTES = 1024**2
_BLOCK_BYTES = 1024
# what direct access to a disk asks of addresses
_ALIGNED_BYTES = 512


def check(workload: Workload, nproc: int) -> None:
    """Refuse what no engine can do here.

    Args:
        workload: what is to be trained.
        nproc: number of processes.

    Raises:
        ScaleError: no number, fewer GPUs than processes, a plan in force, or BatchNorm.
    """
    if not isinstance(nproc, int) or nproc < 1:
        raise ScaleError(f"nproc {nproc!r}: expected a whole number of processes, 1 or more")
    gpus = torch.cuda.device_count() if workload.device.type == "cuda" else nproc
    if nproc > gpus:
        raise ScaleError(f"nproc {nproc}: this machine has {gpus} GPUs; use nproc={gpus}, or move the model to the CPU")
    session = session_of(workload.model)
    if session is not None and session.plan != Plan():
        raise ScaleError(
            f"{session.plan.label} is in force on {workload.name}: undo it first (session.undo(), %memfit undo), and give "
            "what the ranks are to use with --scale"
        )
    for module_name, module in workload.model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and nproc > 1:
            raise ScaleError(
                f"{workload.name} has BatchNorm ({module_name}), whose statistics depend on the whole batch: replace it "
                "by GroupNorm"
            )


def check_engine(workload: Workload, scale: Scale, nproc: int) -> None:
    """Refuse what the engine cannot do here.

    Args:
        workload: what is to be trained.
        scale: engine and plan.
        nproc: number of processes.

    Raises:
        RefusalError: the engine does not go together with the model.
        ScaleError: what it needs of the system is missing.
        MissingExtraError: its library is not installed.
    """
    if scale.engine == "tp":
        tp.check(workload.model, workload.name, nproc)
    if scale.engine.startswith("zero"):
        require_installed("deepspeed")
    if not scale.uses_files:
        return
    broken = _broken_in_files(workload, nproc)
    if broken:
        raise RefusalError(
            "scale",
            f"the part of {broken} that each of {nproc} processes has does not begin and end with a block of a disk, and "
            "DeepSpeed 0.19 updates such parameters wrongly",
            "use --offload optimizer, in host memory",
        )
    if not has_libaio():
        raise ScaleError(
            f"--scale {scale.engine} {scale.plan} needs a C++ compiler and libaio with its header, and a program that uses "
            "it could not be built: apt-get install g++ ninja-build libaio-dev (or CFLAGS and LDFLAGS that say where it is)"
        )


def _broken_in_files(workload: Workload, nproc: int) -> str:
    """Name of a trained parameter whose shards DeepSpeed would read back wrongly; empty where there is none."""
    names = tensors.names_of(workload.model)
    for group in (group for optimizer in workload.optimizers for group in optimizer.param_groups):
        begins_bytes = 0  # in the flat buffer of the group
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            shard_bytes = 4 * -(-parameter.numel() // nproc)
            is_unaligned = begins_bytes % _ALIGNED_BYTES or shard_bytes % _BLOCK_BYTES
            if shard_bytes >= _SWAPPED_FROM_BYTES and is_unaligned:
                return names[id(parameter)]
            begins_bytes += shard_bytes
    return ""


def has_libaio() -> bool:
    """Whether DeepSpeed will be able to build what reads and writes files for it."""
    words = [word for name in ("CFLAGS", "LDFLAGS") for word in shlex.split(os.environ.get(name, ""))]
    build = ["c++", "-x", "c++", "-shared", "-fPIC", "-", "-o", os.devnull, *words, "-laio"]
    try:
        built = subprocess.run(build, input=b"#include <libaio.h>\n", capture_output=True, check=False)  # noqa: S603 - its own words
    except FileNotFoundError:
        return False
    return built.returncode == 0
