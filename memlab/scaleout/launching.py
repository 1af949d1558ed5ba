"""`launch`: train in many processes from where the live objects are, and bring everything back into them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from memlab.errors import ScaleError
from memlab.extras import require_installed
from memlab.plan import Plan
from memlab.plan.scale import Scale
from memlab.plan.settings.scale import zero_stage
from memlab.records import StepRecord
from memlab.records.comparison import Comparison
from memlab.records.run_record import RunRecord
from memlab.runtime.accelerator import name_of
from memlab.runtime.modules import signature_of
from memlab.runtime.workload import Workload
from memlab.scaleout import async_io, serialization, tensors
from memlab.scaleout.engines import tp
from memlab.scaleout.engines.base import DISK
from memlab.scaleout.engines.deepspeed_engine import check_optimizers
from memlab.scaleout.messages import DONE, FAILED, SAID, STARTED, STEP, MessageReader, RunStatus, failure, hung
from memlab.scaleout.results import random_states, read_results, restore_results
from memlab.scaleout.worker import JOB, PACKED, RESULTS, SENT, VALUES, RankJob
from memlab.session import session_of
from memlab.units import format_bytes

_LISTEN_SECONDS = 0.1
_NO_STEP = "no optimizer step ended on the ranks, so nothing was measured"


@dataclass(frozen=True)
class Launched:
    """A run in many processes whose results are back."""

    value: Any  # what the function returned on rank 0
    comparison: Comparison | None  # memory and speed of each rank; None where no optimizer step ended
    steps: tuple[StepRecord, ...]  # the steps, as rank 0 saw them; losses are those of whole batches
    seconds: Mapping[str, float]  # seconds spent on sending, starting, training and returning, by name

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(step.loss for step in self.steps if step.loss is not None)

    def __str__(self) -> str:
        return str(self.comparison) if self.comparison is not None else _NO_STEP

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str | None:
        return self.comparison._repr_html_() if self.comparison is not None else f"<p>{_NO_STEP}</p>"

    def _repr_png_(self) -> tuple[bytes, dict[str, str]] | None:
        from memlab.report import image, text

        shown = self.comparison
        return (image.png(shown), {"alt": text.summary(shown)}) if shown is not None else None


def launch(
    train: Callable[..., Any],
    workload: Workload,
    plan: Scale | str,
    *,
    nproc: int = 2,
    capacity_bytes: int | None = None,
    hang_seconds: float = 600.0,
    say: Callable[[str], Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Launched:
    """Run a training function in many processes, starting from the live objects and writing the results back into them.

    Every rank runs the whole function over the same batches. At the model call a rank takes its own rows, and gets the
    outputs and the loss of the whole batch, so that an unchanged loop trains as it would in one process.

    Args:
        train: called with the rank's workload when it takes an argument, without one otherwise. Model, optimizers and
            scheduler may also be used as variables from around it.
        workload: what is trained.
        plan: engine and plan, as in ``"--scale fsdp2 --checkpoint"``.
        nproc: number of processes.
        capacity_bytes: size of each rank's device; None for its own.
        hang_seconds: how long all ranks may be silent before the run is given up.
        say: called with what rank 0 prints, as it comes; by default it is printed here.
        progress: called with a line on how far the run is.

    Returns:
        The value of the function on rank 0, and what each rank needed.

    Raises:
        ScaleError: it cannot begin (what cannot be sent, too few GPUs, no room on the disk), or a rank failed; the live
            objects are then as they were.
        PlanError: a plan without an engine, or with flags that are none.
        RefusalError: the engine does not go together with the plan or the model.
        MissingExtraError: DeepSpeed is not installed, and a ZeRO stage is asked for.

    Example:
        .. code-block:: python

            def train():
                for batch in batches:
                    loss = model(**batch).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()

            memlab.launch(train, memlab.Workload(model, optimizer), "--scale zero3", nproc=2)
    """
    scale = plan if isinstance(plan, Scale) else Scale.parse(plan)
    check(workload, nproc)
    check_engine(workload, scale, nproc)
    seconds: dict[str, float] = {}
    for note in scale.notes:
        progress(note)
    if scale.uses_files:
        async_io.ensure_built(workload.device, progress)
    with _folder(workload, scale) as folder:
        with _timed(seconds, "out"):
            _send(folder, train, workload, scale, capacity_bytes)
        with _timed(seconds, "there"):
            status = _run(folder, nproc, hang_seconds, say or sys.stdout.write, progress)
        comparison = _comparison(folder, nproc, workload, scale)
        with _timed(seconds, "back"):
            results = read_results(folder / VALUES)
            restore_results(folder / RESULTS, results, workload)
    return Launched(results.value, comparison, tuple(status.steps), seconds)


@contextmanager
def _folder(workload: Workload, scale: Scale) -> Iterator[Path]:
    """A folder for one job, with room for what goes out, what comes back and what is offloaded to it."""
    folder = Path(tempfile.mkdtemp(prefix="memlab-"))
    try:
        size_bytes = 2 * sum(tensor.nbytes for tensor in tensors.all_of(workload).values())
        trained = sum(parameter.numel() for parameter in workload.model.parameters() if parameter.requires_grad)
        # DeepSpeed keeps each trained parameter, its gradient and two moments in files, in fp32
        offloaded_bytes = 16 * trained if scale.uses_files else 0
        free_bytes = shutil.disk_usage(folder).free
        if size_bytes + offloaded_bytes > free_bytes:
            offloaded = f", and {format_bytes(offloaded_bytes)} are offloaded to others" if offloaded_bytes else ""
            raise ScaleError(
                f"{workload.name} is sent and returned through files of {format_bytes(size_bytes)}{offloaded}, and "
                f"{folder.parent} has {format_bytes(free_bytes)} free: set TMPDIR to a disk with more room"
            )
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began


def _send(
    folder: Path, train: Callable[..., Any], workload: Workload, scale: Scale, capacity_bytes: int | None
) -> None:
    everything = tensors.all_of(workload)
    # counts of steps are wanted before tensors are read
    apart = {key: tensor for key, tensor in everything.items() if tensor.dim() or not key.startswith("optimizer.")}
    job = RankJob(str(scale), workload.device.type, capacity_bytes, torch.initial_seed() % 2**31)
    what = {
        "workload": workload, "train": train, "takes_workload": _takes_an_argument(train),
        "random": random_states(workload.device),
    }  # fmt: skip
    (folder / JOB).write_text(json.dumps(asdict(job)))
    (folder / PACKED).write_bytes(serialization.pack(what, apart.values()))
    tensors.store(apart, folder / SENT)
    (folder / DISK).mkdir()


def _takes_an_argument(train: Callable[..., Any]) -> bool:
    needed = [
        each
        for each in signature_of(train).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
    ]
    if len(needed) > 1:
        names = ", ".join(each.name for each in needed)
        raise ScaleError(f"the training function takes {names}: expected no argument, or one, the workload")
    return bool(needed)


# -- the run ---------------------------------------------------------------------------------------


def _run(
    folder: Path, nproc: int, hang_seconds: float, say: Callable[[str], Any], progress: Callable[[str], None]
) -> RunStatus:
    """Start the ranks and listen to them until all are done, or one has failed; none is left running."""
    status, listener, log = RunStatus(), MessageReader(folder, nproc), folder / "log"
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        ranks.extend(_started(folder, rank, nproc, log) for rank in range(nproc))
        while len(status.exit_codes) < nproc and not any(status.exit_codes.values()):
            time.sleep(_LISTEN_SECONDS)
            _listen(listener, status, nproc, say, progress)
            if time.monotonic() - status.last > hang_seconds:
                raise ScaleError(hung(status, nproc, hang_seconds))
            status.exit_codes = {n: code for n, rank in enumerate(ranks) if (code := rank.poll()) is not None}
        _listen(listener, status, nproc, say, progress)
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes it has started
            process.communicate()
    if len(status.done) < nproc:
        raise failure(status, nproc, log.read_text(errors="replace"))
    return status


def _started(folder: Path, rank: int, nproc: int, log: Path) -> subprocess.Popen[bytes]:
    # as torchrun sets it, for libraries in the loop that look for it; nobody opens the port
    environment = {
        **_environment(nproc), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": folder.name,
    }  # fmt: skip
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603 - this interpreter, with paths of our own
            [sys.executable, "-u", "-c", "from memlab.scaleout.worker import main; main()", str(folder)],
            stdout=output, stderr=output, stdin=subprocess.PIPE, env=environment, start_new_session=True,
        )  # fmt: skip


def _environment(nproc: int) -> dict[str, str]:
    """Ranks find the modules this process finds, and share its cores."""
    paths = [path for path in sys.path if path] + [str(Path.cwd())]
    threads = str(max(1, torch.get_num_threads() // nproc))
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


def _listen(
    listener: MessageReader, status: RunStatus, nproc: int, say: Callable[[str], Any], progress: Callable[[str], None]
) -> None:
    for message in listener.news():
        status.last = time.monotonic()
        content = message.content
        if message.kind == STARTED:
            status.started.add(message.rank)
        elif message.kind == STEP:
            step = StepRecord(**content)
            status.reached[message.rank] = step.step
            if step.peak_allocated_bytes is not None:
                status.peak_bytes[message.rank] = step.peak_allocated_bytes
            if message.rank == 0:
                status.steps.append(step)
                progress(_line(step, nproc, status.peak_bytes))
        elif message.kind == SAID:
            say(content["text"])
        elif message.kind == DONE:
            status.done.add(message.rank)
        elif message.kind == FAILED:
            status.failed.append(message)


def _line(step: StepRecord, nproc: int, peak_bytes: Mapping[int, int]) -> str:
    """Return how far the run is; peaks are those of the last step that each rank has told of."""
    loss = f" · loss {step.loss:.4g}" if step.loss is not None else ""
    speed = f"{step.samples / max(step.seconds, 1e-9):.3g} samples/s"
    return f"step {step.step} on {nproc} processes{loss} · {speed}{_peaks(peak_bytes)}"


def _peaks(peak_bytes: Mapping[int, int]) -> str:
    """Return what the ranks needed, in words.

    Example:
        >>> _peaks({0: 2**30, 1: 2**30}), _peaks({0: 2**30, 1: 2**31}), _peaks({})
        (' · peak 1.00 GiB a rank', ' · peaks 1.00 GiB (rank 0) to 2.00 GiB (rank 1)', '')
    """
    if not peak_bytes:
        return ""
    least, most = min(peak_bytes, key=peak_bytes.__getitem__), max(peak_bytes, key=peak_bytes.__getitem__)
    low, high = format_bytes(peak_bytes[least]), format_bytes(peak_bytes[most])
    return f" · peak {low} a rank" if low == high else f" · peaks {low} (rank {least}) to {high} (rank {most})"


def _comparison(folder: Path, nproc: int, workload: Workload, scale: Scale) -> Comparison | None:
    measured = [
        measurement
        for rank in range(nproc)
        if (path := folder / f"rank{rank}.json").exists()
        for measurement in RunRecord.from_json(path.read_text()).comparison.measurements
    ]
    title = f"{workload.name} · {nproc} processes · {scale}"
    return Comparison(title, tuple(measured), are_ranks=True) if measured else None


def check(workload: Workload, nproc: int) -> None:
    """Refuse what no engine can do here."""
    if not isinstance(nproc, int) or nproc < 1:
        raise ScaleError(f"nproc {nproc!r}: expected a whole number of processes, 1 or more")
    if workload.device.type not in ("cpu", "cuda"):
        raise ScaleError(
            f"nproc {nproc}: the model is on {name_of(workload.device)}, and processes train together on CUDA and on the CPU: move it to one of them"
        )
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
    """Refuse what the engine cannot do here."""
    if scale.engine == "tp":
        tp.check(workload.model, workload.name, nproc)
    if zero_stage(scale.engine):
        require_installed("deepspeed")
        check_optimizers(workload)
    if scale.uses_files and (reason := async_io.missing(workload.device)):
        raise ScaleError(
            f"--scale {scale.engine} {scale.plan} needs a C++ compiler and libaio with its header, and {reason}: {async_io.INSTALL}"
        )
