"""The process that starts the ranks with torchrun's launcher.

It is a process of its own, so that the notebook's never waits in it, and can end it whatever it does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from memlab.scaleout.messages import ENDED, Sender

_RANK = "from memlab.scaleout.worker import main; main()"


def main() -> None:
    """Start the ranks, wait for them, and say how those that failed ended."""
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=folder.name, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, start_method="spawn", monitor_interval=0.1,
    )  # fmt: skip
    sender = Sender(folder, ranks)
    try:
        elastic_launch(config, entrypoint=sys.executable)("-u", "-c", _RANK, str(folder))
    except ChildFailedError as error:
        failures = {str(rank): [failure.exitcode, failure.timestamp] for rank, failure in error.failures.items()}
        sender.say(ENDED, failures=failures)
        sys.exit(1)
