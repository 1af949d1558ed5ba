"""One rank, as torchrun's launcher starts it with a folder as its argument."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from memlab.measuring.device import device_for
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.plan.scale import Scale
from memlab.records import Measurement
from memlab.records.comparison import Comparison
from memlab.records.run_record import RunRecord
from memlab.runtime import optimizer_step
from memlab.runtime.hooks import ForwardSeam, chained, install_step_seam, loss_of
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.workload import Batch, Workload
from memlab.scaleout import serialization, tensors
from memlab.scaleout.clipping import Clipping
from memlab.scaleout.engines import engine_for
from memlab.scaleout.engines.base import Engine
from memlab.scaleout.messages import DONE, FAILED, SAID, STARTED, STEP, Sender
from memlab.scaleout.resizes import tell_resizes
from memlab.scaleout.rows import Rows
from memlab.session.in_force import InForce
from memlab.session.snapshot import random_states, restore_random_states
from memlab.techniques.base import ModelCall

PACKED, OUT, HOME, VALUE, DISK = "packed.pkl", "out", "home", "value.pkl", "offloaded"
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class RankJob:
    """Task of a rank; sent with the objects.

    Args:
        scale: engine and plan, as text.
        name: how the workload is called.
        device: "cpu" or "cuda".
        capacity_bytes: size of each rank's device; None for its own.
        seed: from which the ranks' random numbers start.
    """

    scale: str
    name: str
    device: str
    capacity_bytes: int | None
    seed: int


class Watched:
    """The loop's workload on one rank: an engine, its share of the rows, a meter, at the two seams.

    Args:
        workload: the objects of this rank.
        engine: started.
        job: what is to be done.
        sender: where steps are told.
        techniques: what else applies within a model call.
        meter: of the workload; it has seen the engine start.
    """

    def __init__(
        self, workload: Workload, engine: Engine, job: RankJob, sender: Sender, techniques: InForce, meter: Meter
    ) -> None:
        self._workload = workload
        self._engine = engine
        self._sender = sender
        self._techniques = techniques
        self._meter = meter
        self._plan = Scale.parse(job.scale).plan
        self._rows = Rows(engine, self._around, self._plan.accumulation, job.name, job.seed)
        self._meter.plan_changed(self._plan)
        self._told = 0

    def __enter__(self) -> Self:
        self._undo = ExitStack()
        tell_resizes(self._meter.storage_resized, self._undo)
        ForwardSeam(self._workload.model, self._on_forward).install(self._undo)
        for optimizer in self._workload.optimizers:
            install_step_seam(optimizer, self._before_step, self._after_step, self._undo)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._undo.close()
        self._meter.close()

    def _on_forward(self, _original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not (self._workload.model.training and torch.is_grad_enabled()):
            return self._engine.call(*args, **kwargs)
        self._meter.forward_begins(Batch(args, kwargs))
        output = self._rows.call(args, kwargs)
        self._meter.forward_ended(loss_of(output))
        return output

    def _around(self, call: ModelCall) -> ModelCall:
        return chained([technique.forward for technique in self._techniques.techniques], call)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._meter.step_begins(optimizer)
        if self._engine.owns_steps and not self._engine.is_stepping:
            return optimizer_step.take_over(self._engine.step)(optimizer, args, kwargs)
        if any(technique.stepper(optimizer) is not None for technique in self._techniques.techniques):
            return optimizer_step.take_over(self._converted_step)(optimizer, args, kwargs)
        return None

    def _converted_step(self, optimizer: Optimizer) -> None:
        optimizer_step.run_step(optimizer, self._techniques.techniques)

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._engine.is_stepping:
            return
        self._engine.learnt.updates += 1
        self._meter.step_ended(optimizer)
        for step in self._meter.steps_after(self._told):
            self._told = step.step
            self._sender.say(
                STEP, step=step.step, seconds=step.seconds, loss=step.loss, samples=step.samples, tokens=step.tokens,
                peak_bytes=step.peak_allocated_bytes,
            )  # fmt: skip

    def measurement(self, label: str) -> Measurement | None:
        """Memory and speed of this rank, under a name of its own; None before a step has ended."""
        if not self._told:
            return None
        return replace(self._meter.measurement(self._plan), plan=label)


class _Said(io.TextIOBase):
    """Output of the loop on rank 0, line by line."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def write(self, text: str) -> int:
        self._sender.say(SAID, text=text)
        return len(text)


@dataclass(frozen=True)
class Home:
    """Results beside tensors, as rank 0 has them in the end.

    Args:
        value: what the function returned.
        groups: settings of each optimizer's groups, without parameters.
        plain_state: entries of optimizer state that are no tensors, by optimizer, parameter and entry.
        scheduler: its state dict, or None.
        random: random states of the loop.
    """

    value: Any
    groups: list[list[dict[str, Any]]]
    plain_state: list[dict[str, dict[str, Any]]]
    scheduler: Any
    random: tuple[Any, ...]


def main() -> None:
    """Do the job that lies in a folder."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    sender = Sender(folder, rank)
    sender.say(STARTED, pid=os.getpid())
    try:
        _work(folder, rank, sender)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is told
        sender.say(
            FAILED, error=type(error).__name__, text=str(error), traceback=_traceback(error),
            ran_out=is_out_of_memory(error) if isinstance(error, Exception) else False,
        )  # fmt: skip
        # others wait for this rank in a collective: whoever started us ends them
        os._exit(1)
    sender.say(DONE)
    # all is written down; what libraries do when an interpreter ends could only spoil it
    os._exit(0)


def _work(folder: Path, rank: int, sender: Sender) -> None:
    clipping = Clipping()
    packed = (folder / PACKED).read_bytes()
    opened = serialization.unpack(packed, serialization.Apart.placeholder)
    job: RankJob = opened["job"]
    device = _device(job)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    workload: Workload = opened["workload"]
    scale = Scale.parse(job.scale)
    techniques = InForce(Workload(workload.model, name=job.name))
    # rows are split again by `rows`, and what is offloaded is the engine's
    techniques.change(replace(scale.plan, offload=(), accumulation=1))
    engine = engine_for(scale)(workload, folder / OUT, device, scale)
    meter = Meter(workload.model, workload.optimizers, device_for(device, job.capacity_bytes))
    with meter.engine_starts():
        engine.start()
    for optimizer in workload.optimizers:
        techniques.attach_optimizer(optimizer)
    clipping.engine_clips = engine.clip
    random_state = opened["random"]
    restore_random_states(random_state, device)
    with Watched(workload, engine, job, sender, techniques, meter) as watched, _spoken(sender, rank):
        value = opened["train"](workload) if opened["takes_workload"] else opened["train"]()
        measured = watched.measurement(f"rank {rank}")
    if measured is not None:
        (folder / f"rank{rank}.json").write_text(RunRecord(Comparison(job.name, (measured,))).to_json())
    techniques.change(Plan())  # moments go home as they came
    engine.save(folder / HOME)
    if rank == 0:
        _leave(folder, workload, engine, value)
    dist.barrier()
    engine.stop()
    dist.destroy_process_group()


def _leave(folder: Path, workload: Workload, engine: Engine, value: Any) -> None:
    names = tensors.names_of(workload.model)
    plain = [
        {
            names[id(parameter)]: {entry: state[entry] for entry in tensors.scalars_in(state)}
            for parameter, state in optimizer.state.items()
            if id(parameter) in names
        }
        for optimizer in workload.optimizers
    ]
    home = Home(
        value,
        [
            [{k: v for k, v in group.items() if k in engine.settings} for group in o.param_groups]
            for o in workload.optimizers
        ],
        plain,
        workload.scheduler.state_dict() if workload.scheduler is not None else None,
        random_states(engine.device),
    )
    (folder / VALUE).write_bytes(serialization.pack({"what the loop returned": home}, {}))


def _device(job: RankJob) -> torch.device:
    if job.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def _spoken(sender: Sender, rank: int) -> Iterator[None]:
    """Send on what rank 0 prints; what the others print would only repeat it."""
    with contextlib.redirect_stdout(_Said(sender) if rank == 0 else io.StringIO()):
        yield


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
