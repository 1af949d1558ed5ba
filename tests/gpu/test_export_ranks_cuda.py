"""Exported programs and files on two GPUs; run on emulated ones so far."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab.exporting import export
from tests.exporting.test_ranks import PREPARED_LOOP, RATE, losses_in, namespace_of, plain, run
from tests.helpers.needs import needs

pytestmark = [needs(gpu=2), pytest.mark.timeout(600)]
# GPUs round in other places than the CPU, which the plain loop runs on
CLOSE = 1e-3


@pytest.mark.parametrize("flags", ["--scale ddp", "--scale fsdp2 --checkpoint", "--scale fsdp2 --offload optimizer"])
def test_the_program_for_torchrun_runs_on_two_gpus(flags: str, tmp_path: Path) -> None:
    program = export(flags, "torch")
    (tmp_path / "train.py").write_text(program)
    printed = run(tmp_path, "torch.distributed.run", "--nproc-per-node", "2", "train.py", on_gpus=True)
    assert losses_in(printed) == pytest.approx(plain(list(namespace_of(program)["make_batches"]()), 5e-5), rel=CLOSE)


WITH_ACCELERATE = f"""
import json
import torch
from accelerate import Accelerator
from memlab.exporting import export
from tests.exporting.test_ranks import RATE, namespace_of

{PREPARED_LOOP}
if accelerator.is_main_process:
    print(json.dumps(losses), flush=True)
accelerator.end_training()
"""


@pytest.mark.parametrize(
    "flags",
    [
        "--scale ddp",
        "--scale fsdp2 --checkpoint",
        pytest.param("--scale zero3", marks=needs(extra="deepspeed")),
    ],
)
def test_the_file_for_accelerate_runs_on_two_gpus(flags: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "accelerate.yaml").write_text(export(flags, "accelerate"))
    (tmp_path / "train.py").write_text(WITH_ACCELERATE)
    command = ("accelerate.commands.launch", "--config_file", "accelerate.yaml", "train.py")
    batches = list(namespace_of(export("--scale ddp", "torch"))["make_batches"]())
    assert losses_in(run(tmp_path, *command, on_gpus=True)) == pytest.approx(plain(batches, RATE), rel=CLOSE)
