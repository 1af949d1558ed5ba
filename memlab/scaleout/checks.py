"""Checks that refuse, before any process starts, what would fail."""

from __future__ import annotations

import torch

from memlab.errors import ScaleError
from memlab.extras import require_installed
from memlab.plan import Plan
from memlab.plan.scale import Scale
from memlab.runtime.workload import Workload
from memlab.scaleout import async_io
from memlab.scaleout.engines import tp
from memlab.scaleout.engines.deepspeed_engine import check_optimizers
from memlab.session import session_of


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
        check_optimizers(workload)
    if scale.uses_files and (reason := async_io.missing(workload.device)):
        raise ScaleError(
            f"--scale {scale.engine} {scale.plan} needs a C++ compiler and libaio with its header, and {reason}: {async_io.INSTALL}"
        )
