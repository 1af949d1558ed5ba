"""One rank: a process that `launching` starts with a folder as its argument."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from memlab.errors import ScaleError
from memlab.measuring.device import device_for
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.plan.scale import Scale
from memlab.records import Measurement
from memlab.records.comparison import Comparison
from memlab.records.run_record import RunRecord
from memlab.runtime import optimizer_step
from memlab.runtime.batch import Batch
from memlab.runtime.hooks import CallHook, chained, install_step_hooks, keep_last, loss_of, on_each_step
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.plain_step import take_over
from memlab.runtime.workload import Workload
from memlab.scaleout import serialization
from memlab.scaleout.engines import engine_for
from memlab.scaleout.engines.base import Engine
from memlab.scaleout.messages import DONE, FAILED, SAID, STARTED, STEP, Sender
from memlab.scaleout.one_rank import backends_for
from memlab.scaleout.results import restore_random_states, write_results
from memlab.scaleout.rows import Rows
from memlab.scaleout.storage_resizes import tell_resizes
from memlab.session.in_force import InForce
from memlab.techniques.base import ModelCall

JOB, PACKED, SENT, RESULTS, VALUES = "job.json", "packed.pkl", "sent", "results", "values.pkl"
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class RankJob:
    """Task of a rank; sent with the objects."""

    scale: str  # engine and plan, as text
    device: str  # "cpu" or "cuda"
    capacity_bytes: int | None  # size of each rank's device; None for its own
    seed: int  # from which the ranks' random numbers start


class RankLoop:
    """The loop's workload on one rank: an engine, its share of the rows, a meter, at the two hooks."""

    def __init__(
        self, workload: Workload, engine: Engine, job: RankJob, sender: Sender, techniques: InForce, meter: Meter
    ) -> None:
        self._workload = workload
        self._engine = engine
        self._sender = sender
        self._techniques = techniques
        self._meter = meter
        self._plan = engine.scale.plan
        self._rows = Rows(engine, self._around, self._plan.accumulation, workload.name, job.seed)
        self._meter.plan_changed(self._plan)
        self._name = f"rank {dist.get_rank()}"
        self._last_said = 0

    def __enter__(self) -> Self:
        self._undo = ExitStack()
        tell_resizes(self._meter.storage_resized, self._undo)
        CallHook(self._workload.model, self._on_forward).install(self._undo)
        on_each_step(self._on_any_step, self._undo)
        for optimizer in self._workload.optimizers:
            install_step_hooks(optimizer, self._before_step, self._after_step, self._undo)
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

    def _on_any_step(self, optimizer: Optimizer) -> None:
        keep_last(optimizer, self._before_step)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._meter.step_begins(optimizer)
        if self._engine.owns_steps and not self._engine.is_stepping:
            return take_over(self._engine.step)(optimizer, args, kwargs)
        if optimizer_step.foreign_stepper(optimizer, self._techniques.techniques) is not None:
            convert = partial(optimizer_step.run_step, techniques=self._techniques.techniques)
            return take_over(convert)(optimizer, args, kwargs)
        return None

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._engine.is_stepping:
            return
        self._engine.learnt.updates += 1
        self._meter.step_ended(optimizer)
        for step in self._meter.times.steps_after(self._last_said):
            self._last_said = step.step
            self._sender.say(STEP, **asdict(replace(step, plan=self._name)))

    def measurement(self) -> Measurement | None:
        """Memory and speed of this rank, under its name; None before a step has ended."""
        return replace(self._meter.measurement(self._plan), plan=self._name) if self._last_said else None


class _Output(io.TextIOBase):
    """Output of the loop on rank 0, line by line."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def write(self, text: str) -> int:
        self._sender.say(SAID, text=text)
        return len(text)


def main() -> None:
    """Do the job that lies in a folder."""
    _end_with_parent()
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    sender = Sender(folder, rank)
    sender.say(STARTED)
    try:
        _work(folder, rank, sender)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is told
        sender.say(
            FAILED, error=type(error).__name__, text=str(error), traceback="".join(traceback.format_exception(error)),
            ran_out=is_out_of_memory(error) if isinstance(error, Exception) else False,
        )  # fmt: skip
        # others wait for this rank in a collective: whoever started us ends them
        os._exit(1)
    sender.say(DONE)
    # all is written down; what libraries do when an interpreter ends could only spoil it
    os._exit(0)


def _end_with_parent() -> None:
    """End when the process ends that holds the other end of standard input: a kernel that is killed leaves no rank on a GPU."""
    held = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # what the loop sees
    os.close(nothing)

    def wait() -> None:
        os.read(held, 1)
        os.killpg(0, signal.SIGKILL)  # with the processes it has started

    threading.Thread(target=wait, name="memlab-parent", daemon=True).start()


def _work(folder: Path, rank: int, sender: Sender) -> None:
    clipping = Clipping()
    job = RankJob(**json.loads((folder / JOB).read_text()))
    device = _device(job)
    opened = serialization.unpack((folder / PACKED).read_bytes())
    # ranks find each other through a file: no port is needed
    ranks, store = int(os.environ["WORLD_SIZE"]), f"file://{folder / 'store'}"
    dist.init_process_group(backends_for(device), init_method=store, rank=rank, world_size=ranks)
    workload: Workload = opened["workload"]
    scale = Scale.parse(job.scale)
    techniques = InForce(Workload(workload.model, name=workload.name))
    # rows are split again by `rows`, and what is offloaded is the engine's
    techniques.change(replace(scale.plan, offload=(), accumulation=1))
    engine = engine_for(scale)(workload, folder / SENT, device, scale)
    meter = Meter(workload.model, workload.optimizers, device_for(device, job.capacity_bytes))
    with meter.engine_starts():
        engine.start()
    for optimizer in workload.optimizers:
        techniques.attach_optimizer(optimizer)
    clipping.engine_clips = engine.clip
    restore_random_states(opened["random"], device)
    # what the other ranks print would only repeat it
    output = _Output(sender) if rank == 0 else io.StringIO()
    with RankLoop(workload, engine, job, sender, techniques, meter) as watched, contextlib.redirect_stdout(output):
        value = opened["train"](workload) if opened["takes_workload"] else opened["train"]()
        measured = watched.measurement()
    if measured is not None:
        (folder / f"rank{rank}.json").write_text(RunRecord(Comparison(workload.name, (measured,))).to_json())
    techniques.change(Plan())  # moments go back as they came
    engine.save(folder / RESULTS)
    if rank == 0:
        write_results(folder / VALUES, workload, engine, value)
    dist.barrier()
    engine.stop()
    dist.destroy_process_group()


def _device(job: RankJob) -> torch.device:
    if job.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


_original = nn.utils.clip_grad_norm_
Clip = Callable[[Iterable[nn.Parameter], float], torch.Tensor | None]


class Clipping:
    """Takes the place of torch's function in a rank's process, before the loop's modules are read."""

    def __init__(self) -> None:
        self.engine_clips: Clip = lambda _parameters, _norm: None
        nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_ = self._clip

    def _clip(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        listed: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = self.engine_clips(listed, max_norm)
        if norm is None:
            return _original(listed, max_norm, norm_type, *args, **kwargs)
        if norm_type != 2.0:
            raise ScaleError(
                f"clip_grad_norm_ with norm_type={norm_type:g}: ZeRO clips by the 2-norm; use --scale fsdp2"
            )
        return norm
