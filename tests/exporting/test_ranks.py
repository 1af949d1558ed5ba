"""What is exported for several processes runs there as it stands, on two CPU processes, and trains as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memlab.errors import PlanError, RefusalError
from memlab.exporting import TARGETS, export
from memlab.exporting.ranks import to_ranks
from memlab.plan import Plan
from memlab.plan.scale import Scale
from memlab.plan.settings.scale import ENGINES
from tests.helpers.needs import needs

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
RATE = 1e-3
# two ranks add up in another order than one process
CLOSE = 2e-5


def run(folder: Path, *command: str, on_gpus: bool = False) -> str:
    """What a command prints that is run in a folder; without GPUs unless they are asked for."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if not on_gpus:
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def namespace_of(code: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "exported"}
    exec(compile(code, "<exported>", "exec"), namespace)
    return namespace


def losses_in(printed: str) -> list[float]:
    (line,) = [line for line in printed.splitlines() if line.startswith("[") and line.endswith("]")]
    losses: list[float] = json.loads(line)
    return losses


def plain(batches: list[dict[str, torch.Tensor]], rate: float) -> list[float]:
    """A loop in one process, over the model of an exported program."""
    model = namespace_of(export("--scale ddp", "torch"))["make_model"]().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def batches() -> list[dict[str, torch.Tensor]]:
    return list(namespace_of(export("--scale ddp", "torch"))["make_batches"]())


@pytest.mark.full
def test_the_program_for_torchrun_runs_as_it_stands(tmp_path: Path, batches: list[dict[str, torch.Tensor]]) -> None:
    (tmp_path / "train.py").write_text(export("--scale fsdp2 --checkpoint --offload optimizer", "fsdp2"))
    printed = run(tmp_path, "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    assert losses_in(printed) == pytest.approx(plain(batches, 5e-5), rel=CLOSE)


# several programs in one launch; rows of unequal numbers of targets, the last ones with none
SEVERAL = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from tests.exporting.test_ranks import namespace_of, ragged

dist.init_process_group("gloo")
for path in sorted(Path().glob("program*.py")):
    program = namespace_of(path.read_text())
    losses = program["train"](program["make_model"](), ragged(program["make_batches"]()), lr=1e-3)
    if dist.get_rank() == 0:
        print(json.dumps([path.stem, losses]), flush=True)
dist.barrier()
os._exit(0)
"""
PROGRAMS = {
    "program_ddp": ("--scale ddp", 1, CLOSE),
    "program_fsdp2": ("--scale fsdp2", 1, CLOSE),
    "program_parts": ("--scale fsdp2 --checkpoint every:2", 3, CLOSE),
    "program_bf16": ("--scale fsdp2 --bf16", 1, 2e-3),
}


def ragged(batches: Any) -> list[dict[str, torch.Tensor]]:
    """Rows of very different numbers of targets: a mean of means would be far off, and the last two rows have none."""
    kept = []
    for batch in batches:
        labels = batch["input_ids"].clone()
        for row, length in enumerate((32, 3, 20, 2, 9, 32, 0, 0)):
            labels[row, length:] = -100
        kept.append({"input_ids": batch["input_ids"], "labels": labels})
    return kept


@pytest.mark.full
def test_programs_weigh_rows_by_their_targets(tmp_path: Path, batches: list[dict[str, torch.Tensor]]) -> None:
    for name, (flags, parts, _) in PROGRAMS.items():
        scale = Scale.parse(flags)
        plan = Plan.parse(f"{scale.plan} --accumulate {parts}".strip())
        # the engines of memlab's own ranks take whole batches; the program can do more
        object.__setattr__(scale, "plan", plan)
        (tmp_path / f"{name}.py").write_text(to_ranks(scale.plan, scale, 2))
    (tmp_path / "several.py").write_text(SEVERAL)
    printed = run(tmp_path, "torch.distributed.run", "--nproc-per-node", "2", "several.py")
    found = dict(json.loads(line) for line in printed.splitlines() if line.startswith('["program'))
    expected = plain(ragged(batches), RATE)
    assert found.keys() == PROGRAMS.keys()
    for name, (_, _, tolerance) in PROGRAMS.items():
        assert found[name] == pytest.approx(expected, rel=tolerance), name
    assert expected[-1] < 0.97 * expected[0]


# four rows for each rank: together, a batch
PREPARED_LOOP = """
accelerator = Accelerator()
program = namespace_of(export("--scale ddp --checkpoint", "torch"))
model = program["make_model"]().train()
program["checkpoint_blocks"](model)
rows = [{name: value[row] for name, value in batch.items()} for batch in program["make_batches"]() for row in range(8)]
loader = torch.utils.data.DataLoader(rows, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
"""
WITH_ACCELERATE = f"""
import json, os, sys
import torch
from accelerate import Accelerator
from memlab.exporting import export
from tests.helpers.cpu_ranks import take_the_cpu_for_a_gpu, without_compiling
from tests.exporting.test_ranks import RATE, namespace_of

take_the_cpu_for_a_gpu()
if "DeepSpeed" in sys.argv:
    without_compiling()
{PREPARED_LOOP}
if accelerator.is_main_process:
    shards = [type(parameter).__name__ for parameter in model.parameters()]
    stage = accelerator.state.deepspeed_plugin.zero_stage if accelerator.state.deepspeed_plugin else None
    print(json.dumps({{"type": accelerator.distributed_type, "shard": shards[0], "stage": stage}}))
    print(json.dumps(losses), flush=True)
accelerator.wait_for_everyone()
os._exit(0)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--scale fsdp2 --checkpoint", {"type": "FSDP", "shard": "DTensor", "stage": None}),
        pytest.param(
            "--scale zero3 --checkpoint",
            {"type": "DEEPSPEED", "shard": "Parameter", "stage": 3},
            marks=needs(extra="deepspeed"),
        ),
    ],
)
def test_the_file_for_accelerate_is_launched(
    flags: str, said: dict[str, Any], tmp_path: Path, batches: list[dict[str, torch.Tensor]]
) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "accelerate.yaml").write_text(export(flags, "accelerate"))
    (tmp_path / "train.py").write_text(WITH_ACCELERATE)
    command = ("accelerate.commands.launch", "--config_file", "accelerate.yaml", "train.py")
    printed = run(tmp_path, *command, *(["DeepSpeed"] if "zero" in flags else []))
    (found,) = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert found == said
    assert losses_in(printed) == pytest.approx(plain(batches, RATE), rel=CLOSE)


WITH_TRAINER = """
import json, os
from pathlib import Path
import torch
from transformers import Trainer
from memlab.exporting import export
from tests.helpers.cpu_ranks import take_the_cpu_for_a_gpu, without_compiling
from tests.exporting.test_ranks import RATE, namespace_of

take_the_cpu_for_a_gpu()
without_compiling()

settings = f'max_steps=8, learning_rate={RATE}, lr_scheduler_type="constant", max_grad_norm=0.0, weight_decay=0.01,'
settings += 'logging_steps=1, report_to="none", save_strategy="no", use_cpu=False, disable_tqdm=True,'
args = namespace_of(Path("arguments.py").read_text().replace('output_dir="out",', f'output_dir="out", {settings}'))["args"]
program = namespace_of(export("--scale ddp", "torch"))
rows = [{name: value[row] for name, value in batch.items()} for batch in program["make_batches"]() for row in range(8)]
for row in rows:
    row["labels"] = row["labels"].clone()
    row["labels"][0] = -100  # nobody's target, but the Trainer counts it as one


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(rows)


trainer = InOrder(model=program["make_model"](), args=args, train_dataset=rows)
trainer.train()
if trainer.is_world_process_zero():
    print(json.dumps({"stage": trainer.accelerator.state.deepspeed_plugin.zero_stage}))
    print(json.dumps([line["loss"] for line in trainer.state.log_history if "loss" in line]), flush=True)
trainer.accelerator.wait_for_everyone()
os._exit(0)
"""


@pytest.mark.full
@needs(extra="deepspeed")
def test_the_file_for_deepspeed_and_the_trainers_arguments_are_launched(
    tmp_path: Path, batches: list[dict[str, torch.Tensor]]
) -> None:
    flags = "--scale zero2 --checkpoint"
    (tmp_path / "deepspeed.json").write_text(export(flags, "deepspeed"))
    (tmp_path / "arguments.py").write_text(export(flags, "trainer"))
    (tmp_path / "train.py").write_text(WITH_TRAINER)
    printed = run(tmp_path, "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    assert '{"stage": 2}' in printed
    # the Trainer logs four digits
    assert losses_in(printed) == pytest.approx(plain(batches, RATE), abs=2e-3)


@pytest.mark.parametrize("engine", [each for each in ENGINES if each != "tp"])
def test_every_engine_has_a_target_and_every_text_names_its_plan(engine: str) -> None:
    flags = f"--scale {engine} --checkpoint --bf16"
    written = []
    refused = {}
    for target in TARGETS:
        try:
            written.append(export(flags, target, nproc=4))
        except PlanError as error:
            refused[target] = str(error)
    for target, said in refused.items():
        assert said.startswith(f"--scale {engine} to {target!r}: allowed are ")
        assert target not in said.split("allowed are ")[1].split(", ")
    assert len(written) >= 3
    assert all(flags in text for text in written)
    assert all("4" in text for text in written)


def test_checkpointing_of_blocks_in_shards_is_not_left_to_accelerate() -> None:
    """Its wrapper (`preserve_rng_state=False`) recomputes with other dropout masks, and fills caches twice."""
    text = export("--scale fsdp2 --checkpoint", "accelerate")
    assert "fsdp_activation_checkpointing: false" in text
    assert "checkpointing: checkpoint_blocks(model) of memlab.export(plan, to='torch') before prepare()" in text
    text = export("--scale fsdp2 --checkpoint", "trainer")
    assert '"activation_checkpointing": True' not in text
    assert "**{checkpointing: True" in text


def test_a_plan_without_an_engine_becomes_a_program_under_fsdp2() -> None:
    assert export(Plan.parse("--checkpoint"), "fsdp2") == export("--scale fsdp2 --checkpoint", "torch")
    with pytest.raises(RefusalError, match=r"--scale fsdp2 and --chunk-loss exclude each other"):
        export(Plan.parse("--chunk-loss"), "fsdp2")


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^--checkpoint budget:1MiB on ranks: .*; use --checkpoint every:N$"):
        export("--scale fsdp2 --checkpoint budget:1MiB", "fsdp2")
    with pytest.raises(PlanError, match=r"^--scale zero3 to 'torch': allowed are trainer, accelerate, deepspeed$"):
        export("--scale zero3", "torch")
    with pytest.raises(PlanError, match=r"^nproc 0: expected a whole number of processes"):
        export("--scale zero3", "deepspeed", nproc=0)


def test_tiers_of_an_engine_are_written_down() -> None:
    config = json.loads(export("--scale zero3 --offload optimizer:disk", "deepspeed"))
    assert config["zero_optimization"]["offload_optimizer"] == {
        "device": "nvme", "nvme_path": "nvme", "pin_memory": True,
    }  # fmt: skip
    assert "offload_optimizer_nvme_path: nvme" in export("--scale zero3 --offload optimizer:disk", "accelerate")
    assert "CPUOffloadPolicy" not in export("--scale fsdp2", "fsdp2")


def test_tensor_parallelism_has_no_target_yet() -> None:
    for target in TARGETS:
        with pytest.raises(PlanError, match=f"^--scale tp to '{target}': allowed are no targets yet$"):
            export("--scale tp", target)
