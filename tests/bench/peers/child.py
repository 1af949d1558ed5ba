"""One contestant, once, in a process of its own.

python -m tests.bench.peers.child CONTEST CONTESTANT SCALE FILE    run, and write what was measured to the file
python -m tests.bench.peers.child --fork                           do so for every line of four words, see `fork_for_each`
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

from tests.bench.peers.contests import BY_NAME
from tests.bench.peers.watching import Job


def run(contest: str, contestant: str, scale: str, path: str) -> None:
    """Run a contestant here, and write what was measured to a file."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measured = BY_NAME[contest].contestant(contestant).run(Job(scale, device))
    Path(path).write_text(json.dumps(asdict(measured)))


def fork_for_each() -> None:
    """For every line of standard input, a fork that runs it: its process id is printed, then its exit status.

    This process has imported what all contests use and has done nothing else, so its forks are as good as new ones, and
    they begin at once. Not for a GPU: CUDA may have been looked at, and cannot be used after a fork then.
    """
    importlib.import_module("transformers").Trainer  # noqa: B018 # imported when it is first looked at
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run_and_leave(line.split())
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run_and_leave(words: list[str]) -> None:
    """In the fork: what it says goes beside its file, and it never returns."""
    path = words[-1]
    with Path(f"{path}.errors").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    status = 1
    try:
        run(*words)
        status = 0
    except BaseException:  # noqa: BLE001 # whatever it is, it is reported, and the fork ends here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    if sys.argv[1:] == ["--fork"]:
        fork_for_each()
    else:
        run(*sys.argv[1:])
