"""`memlab doctor`: whether a machine is ready for a workshop, in a minute; its output can be pasted into an issue.

memlab doctor            all checks and a short training run
memlab doctor --no-run   the checks alone
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from memlab import Workload, fit, measure
from memlab.extras import available
from memlab.hardware.host import host_bytes
from memlab.runtime import accelerator
from memlab.support.machine import described, is_at_least, needed
from memlab.units import GIB, format_bytes

_LEAST_HOST_BYTES = 2 * GIB  # for a chapter, which takes 1, and what else runs
_LEAST_FILE_BYTES = 2 * GIB  # for what is offloaded to files
_PLAN = "--accumulate 2 --checkpoint --offload optimizer"
_MARKS = {True: "ok  ", False: "FAIL", None: "note"}


@dataclass(frozen=True)
class Finding:
    """What one check has found."""

    subject: str
    says: str
    is_well: bool | None = True  # None where something is missing that not everybody needs
    do: str = ""  # what to do about it

    def __str__(self) -> str:
        advice = f"; {self.do}" if self.do else ""
        return f"{_MARKS[self.is_well]}  {self.subject:<10} {self.says}{advice}"


def findings(*, run: bool = True) -> Iterator[Finding]:
    """Yield what each check finds, as it finds it.

    Args:
        run: train a small model as well, which takes some seconds.
    """
    checks: list[Callable[[], Iterator[Finding]]] = [_packages, _device, _widgets, _files]
    for check in (*checks, *([_training] if run else [])):
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - that a check fails is what is to be found out
            yield Finding(check.__name__.strip("_"), f"{type(error).__name__}: {error}", is_well=False)


def _packages() -> Iterator[Finding]:
    for extra, is_for_all in (("", True), ("lab", True), ("adapters", False)):
        lacking = [f"{name} ≥ {lowest}" for name, lowest in needed(extra).items() if not _is_there(name, lowest)]
        named = f"memlab[{extra}]" if extra else "memlab"
        if lacking:
            is_well = False if is_for_all else None
            yield Finding("packages", f"{named} needs {', '.join(lacking)}", is_well, f"pip install '{named}'")
        else:
            yield Finding("packages", f"all of {named}")


def _is_there(name: str, lowest: str) -> bool:
    try:
        return is_at_least(metadata.version(name), lowest)
    except metadata.PackageNotFoundError:
        return False


def _device() -> Iterator[Finding]:
    size = host_bytes()
    if size is not None and size < _LEAST_HOST_BYTES:
        yield Finding(
            "memory", f"the host has {format_bytes(size)}", False, f"the course needs {format_bytes(_LEAST_HOST_BYTES)}"
        )
    elif size is not None:
        yield Finding("memory", f"the host has {format_bytes(size)}")
    if accelerator.device_type() is not None:
        device = accelerator.current()
        free, total = accelerator.free_and_total(device)
        says = f"{accelerator.device_name(device)}: {format_bytes(free)} of {format_bytes(total)} free"
        is_free = free > total // 2
        yield Finding(
            "GPU",
            says,
            True if is_free else None,
            ""
            if is_free
            else "other programs hold the rest; the driver's own program (nvidia-smi, rocm-smi, xpu-smi) names them",
        )
    elif torch.version.cuda:
        yield Finding(
            "GPU",
            f"torch is built for CUDA {torch.version.cuda} and finds no GPU",
            None,
            "see whether nvidia-smi finds one; the CPU serves for the course",
        )
    else:
        yield Finding("GPU", "none that torch can use: the CPU's memory is counted instead", None)


def _widgets() -> Iterator[Finding]:
    lacking = [name for name in ("anywidget", "ipywidgets", "ipykernel") if not available(name)]
    if lacking:
        yield Finding(
            "panel",
            f"{' and '.join(lacking)} missing: receipts are text, and there is no panel",
            False,
            "pip install 'memlab[lab]'",
        )
        return
    try:
        spec = json.loads((Path(sys.prefix) / "share/jupyter/kernels/python3/kernel.json").read_text())
    except (OSError, ValueError):
        yield Finding(
            "panel", "this environment has no kernel of its own", None, "python -m ipykernel install --sys-prefix"
        )
        return
    if spec["argv"][0] not in (sys.executable, "python", "python3"):
        yield Finding(
            "panel",
            "the kernel that notebooks start is another Python than this one",
            False,
            "python -m ipykernel install --sys-prefix",
        )
        return
    import_module("memlab.jupyter.panel")  # what draws it must be there as well
    yield Finding("panel", "widgets are there")


def _files() -> Iterator[Finding]:
    for subject, folder in (("folder", Path()), ("temporary", Path(tempfile.gettempdir()))):
        what = "the working folder" if subject == "folder" else "the folder for temporary files"
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"memlab")
        except OSError as error:
            yield Finding(
                subject,
                f"{what} cannot be written to ({error.strerror})",
                False,
                "start from another one, or set TMPDIR",
            )
            continue
        free = shutil.disk_usage(folder).free
        is_enough = free >= _LEAST_FILE_BYTES
        yield Finding(
            subject,
            f"{what} can be written to, {format_bytes(free)} free",
            True if is_enough else None,
            "" if is_enough else "--offload needs files as large as what it moves",
        )


def _training() -> Iterator[Finding]:
    began, losses, peaks = perf_counter(), [], []
    for plan in ("", _PLAN):
        workload = _workload()
        with fit(workload, plan):
            losses.append([_step(workload) for _ in range(4)])
        peaks.append(measure(_workload(), plan).peak_allocated_bytes)
    seconds = perf_counter() - began
    off = max(abs(one - other) / one for one, other in zip(*losses, strict=True))
    if off > 1e-5 or peaks[1] >= peaks[0]:
        yield Finding(
            "training",
            f"{_PLAN}: losses off by {off:.1e}, peak {format_bytes(peaks[1])} instead of {format_bytes(peaks[0])}",
            False,
            "please report it",
        )
        return
    yield Finding(
        "training",
        f"{_PLAN}: same losses, peak {format_bytes(peaks[1])} instead of {format_bytes(peaks[0])} ({seconds:.0f} s)",
    )


def _workload() -> Workload:
    """A small classifier of sequences, its optimizer and a batch."""
    torch.manual_seed(0)
    device = accelerator.device_type() or "cpu"
    layers = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Linear(16, 64), nn.Sequential(*layers), nn.Linear(64, 8)).to(device)
    rows, targets = torch.randn(8, 64, 16, device=device), torch.randn(8, 64, 8, device=device)
    return Workload(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch=((rows,), targets), loss_fn=nn.functional.mse_loss
    )


def _step(workload: Workload) -> float:
    (rows,), targets = workload.batch
    loss = nn.functional.mse_loss(workload.model(rows), targets)
    loss.backward()  # type: ignore[no-untyped-call] # unannotated in torch
    for optimizer in workload.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main(arguments: list[str] | None = None) -> int:
    """Run the command of the shell; returns its exit status."""
    parser = argparse.ArgumentParser(prog="memlab", description="memlab on the command line")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="check whether this machine is ready, in a minute")
    doctor.add_argument("--no-run", action="store_true", help="train nothing")
    given = parser.parse_args(arguments)
    print("\n".join(described()), end="\n\n")  # noqa: T201 - what was asked for
    failed = 0
    for finding in findings(run=not given.no_run):
        print(finding, flush=True)  # noqa: T201 - likewise
        failed += finding.is_well is False
    print("\n" + (f"{failed} to mend before the workshop" if failed else "ready"))  # noqa: T201 - likewise
    return 1 if failed else 0
