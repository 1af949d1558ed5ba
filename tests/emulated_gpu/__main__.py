"""Runs a command on the emulated GPU; see README.md."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.emulated_gpu.build import OPERATORS, ORDER, built
from tests.emulated_gpu.errors import EmulationError
from tests.emulated_gpu.gpus import GPUS, properties
from tests.emulated_gpu.guard import GIB, guarded
from tests.emulated_gpu.whole import run_all

_MOST_DEVICES = 16


def parser() -> argparse.ArgumentParser:
    """What the command line may say."""
    made = argparse.ArgumentParser(
        prog="python -m tests.emulated_gpu", description="Run a command with torch's CUDA build on an emulated GPU."
    )
    made.add_argument("--gpu", default="T4", help=f"which one: {', '.join(GPUS)} (T4)")
    made.add_argument("--gib", type=float, metavar="N", help="size of its memory instead of its own")
    made.add_argument("--devices", type=int, default=1, metavar="N", help="how many of them (1)")
    made.add_argument(
        "--values", action="store_true", help="compute values too, on the CPU; without it only memory is true"
    )
    made.add_argument(
        "--late", action="store_true", help="side streams do nothing before they are waited for; with --values"
    )
    made.add_argument(
        "--host-gib", type=float, default=6, metavar="N", help="what the command may take of this machine (6)"
    )
    made.add_argument("--minutes", type=float, default=60, help="how long it may run (60)")
    made.add_argument(
        "--report", metavar="FILE", help="where to write how often each kernel was launched; - for the screen"
    )
    made.add_argument("--verbose", action="store_true", help="say which functions of CUDA were refused")
    made.add_argument(
        "--all",
        action="store_true",
        help="run all tests there are, or go on with that, and write last_run.md; words after it choose files, and write nothing",
    )
    made.add_argument("command", nargs="*", metavar="-- COMMAND", help="what to run; nothing: only build")
    return made


def environment(asked: argparse.Namespace, folder: Path) -> dict[str, str]:
    """The variables of a process that is to see the emulated GPU."""
    for option, value in (("--gib", asked.gib), ("--host-gib", asked.host_gib), ("--minutes", asked.minutes)):
        if value is not None and not 0 < value < math.inf:
            raise EmulationError(f"{option} {value}: must be more than zero")
    if not 1 <= asked.devices <= _MOST_DEVICES:
        raise EmulationError(f"--devices {asked.devices}: from 1 to {_MOST_DEVICES} GPUs are emulated")
    added = {
        "EMULATED_GPU": properties(asked.gpu, None if asked.gib is None else int(asked.gib * GIB)),
        "EMULATED_GPU_DEVICES": str(asked.devices),
        "EMULATED_GPU_OPERATORS": str(folder / OPERATORS),
        "EMULATED_GPU_VALUES": "1" if asked.values or asked.late else "",
        "EMULATED_GPU_LATE": "1" if asked.late else "",
        "EMULATED_GPU_REPORT": asked.report or "",
        "EMULATED_GPU_VERBOSE": "1" if asked.verbose else "",
        "LD_PRELOAD": " ".join(str(folder / name) for name in (folder / ORDER).read_text().split()),
        "TRITON_LIBCUDA_PATH": str(folder),
        # `pytest` and the like: those of the interpreter that this runs in
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }
    return {**os.environ, **added}


def run(arguments: Sequence[str]) -> int:
    """Build what is missing, then run the command; returns its exit status.

    Raises:
        EmulationError: it cannot be had as asked.
    """
    asked = parser().parse_args(arguments)
    properties(asked.gpu)  # refused before anything is built
    folder = built(lambda line: print(f"emulated GPU: {line}", file=sys.stderr, flush=True))
    if asked.all:
        return run_all(run, asked.command)
    variables = environment(asked, folder)
    if not asked.command:
        return 0
    try:
        status, why = guarded(asked.command, variables, int(asked.host_gib * GIB), 60 * asked.minutes)
    except FileNotFoundError:
        raise EmulationError(f"{asked.command[0]}: no such command") from None
    if why:
        print(f"emulated GPU: {asked.command[0]} was ended: it {why}", file=sys.stderr)
    return status


def main() -> None:
    """Parse the command line and run."""
    try:
        status = run(sys.argv[1:])
    except EmulationError as error:
        print(f"emulated GPU: {error}", file=sys.stderr)
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
