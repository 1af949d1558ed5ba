"""One contestant, once, in a process of its own: ``python -m tests.bench.peers.child CONTEST CONTESTANT SCALE FILE``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from tests.bench.peers.contests import BY_NAME
from tests.bench.peers.watching import Job


def main() -> None:
    """Run, and write what was measured to the file."""
    contest, contestant, scale, path = sys.argv[1:]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measured = BY_NAME[contest].contestant(contestant).run(Job(scale, device))
    Path(path).write_text(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
