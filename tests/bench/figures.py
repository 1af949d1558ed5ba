"""The figures: each returns what was measured and the bound it is held to."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import memlab
from memlab import Workload
from memlab.measuring.device import device_for
from memlab.measuring.runs import measure, training_step
from memlab.measuring.steps import Meter
from memlab.records import Category
from memlab.records.comparison import Comparison
from memlab.runtime.stand_ins import CALL
from memlab.session import Session, fit, session_of
from memlab.units import format_bytes
from tests.bench.timing import paired
from tests.bench.workloads import gpt2


@dataclass(frozen=True)
class Figure:
    """One measured figure.

    Args:
        name: what it says.
        value: the ratio or number.
        bound: what it must not exceed (or None when it is only shown).
        details: how it came about.
    """

    name: str
    value: float
    bound: float | None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return self.bound is None or self.value <= self.bound


def watching(device: torch.device, pairs: int) -> list[Figure]:
    """A session that only watches against the bare loop, on steps it does not observe in detail."""
    workload = gpt2(device, batch=4, tokens=128, small=device.type == "cpu")
    optimizer = workload.optimizers[0]
    session = fit(workload)
    counted_on = device_for(device)
    meter = Meter(workload.model, workload.optimizers, counted_on)
    for _ in range(4):
        session.observers.only([meter])
        training_step(workload)

    def watched() -> None:
        session.observers.only([meter])
        training_step(workload)

    def bare() -> None:
        session.observers.only([])
        handlers = workload.model.__dict__.pop(CALL), optimizer._optimizer_step_pre_hooks.copy()
        optimizer._optimizer_step_pre_hooks.clear()
        try:
            training_step(workload)
        finally:
            workload.model.__dict__[CALL] = handlers[0]
            optimizer._optimizer_step_pre_hooks.update(handlers[1])

    # steps the meter observes in detail are rare and timed apart: leave them out of this ratio
    meter._is_due = lambda: False  # type: ignore[method-assign]
    ratio = paired(watched, bare, pairs)
    meter.close()
    counted_on.close()
    session.undo()
    return [Figure("watching against the bare loop (time)", ratio.median, 1.01, asdict(ratio))]


def rescuing(device: torch.device, pairs: int) -> list[Figure]:
    """A loop that is rescued, in steps in which nothing goes wrong, against one that is not: time, then peak."""
    small = device.type == "cpu"
    workload = gpt2(device, batch=4 if small else 8, tokens=128 if small else 512, small=small)
    session = fit(workload, rescue=True)
    rescuer = session.rescuer
    assert rescuer is not None

    def rescued() -> None:
        session.rescuer = rescuer
        training_step(workload)

    def bare() -> None:
        session.rescuer = None
        training_step(workload)

    ratio = paired(rescued, bare, pairs)
    peaks = [_peak_in(session, work) for work in (rescued, bare)]
    assert rescuer.rescues == []
    session.rescuer = rescuer
    session.undo()
    shown = {"rescue on": format_bytes(peaks[0]), "rescue off": format_bytes(peaks[1])}
    return [
        Figure("rescue on against rescue off (time)", ratio.median, 1.01, asdict(ratio)),
        Figure("rescue on against rescue off (peak)", peaks[0] / peaks[1], 1.001, shown),
    ]


def accumulation(device: torch.device, pairs: int) -> list[Figure]:
    """Transparent accumulation against the loop people write by hand: time, then peak."""
    split, whole = (gpt2(device, batch=8, tokens=128, small=device.type == "cpu") for _ in range(2))

    def transparent() -> None:
        training_step(split)

    def by_hand() -> None:
        _step_by_hand(whole)

    with fit(split, "--accumulate 4"):
        ratio = paired(transparent, by_hand, pairs)
        peaks = [_peak(split, transparent, "--accumulate 4"), _peak(whole, by_hand, "")]
    shown = {"transparent": format_bytes(peaks[0]), "by hand": format_bytes(peaks[1])}
    return [
        Figure("transparent accumulation against a hand-written loop (time)", ratio.median, 1.02, asdict(ratio)),
        Figure("transparent accumulation against a hand-written loop (peak)", peaks[0] / peaks[1], 1.01, shown),
    ]


def by_hand(device: torch.device, pairs: int) -> list[Figure]:
    """A step under one setting against one with what people write instead: CPU time, or time where there is a GPU."""
    import bitsandbytes  # here, because it takes seconds

    clock = time.perf_counter if device.type == "cuda" else time.process_time
    found = []
    for flags, instead in (
        ("--bf16", "torch.autocast"),
        ("--adam8bit", "bitsandbytes.optim.AdamW8bit"),
        ("--checkpoint", "gradient_checkpointing_enable"),
    ):
        ours, theirs = (gpt2(device, batch=4, tokens=128, small=device.type == "cpu") for _ in range(2))
        context: AbstractContextManager[Any] = nullcontext()
        if flags == "--bf16":
            context = torch.autocast(device.type, torch.bfloat16)
        elif flags == "--checkpoint":
            theirs.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        optimizer = (
            bitsandbytes.optim.AdamW8bit(theirs.model.parameters(), lr=1e-4)
            if flags == "--adam8bit"
            else theirs.optimizers[0]
        )

        def step_instead(
            theirs: Workload = theirs, context: AbstractContextManager[Any] = context, optimizer: Any = optimizer
        ) -> None:
            with context:
                loss = theirs.model(**theirs.batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        with fit(ours, flags):
            ratio = paired(lambda ours=ours: training_step(ours), step_instead, pairs, clock=clock)  # type: ignore[misc]
        found.append(Figure(f"{flags} against {instead} (time)", ratio.median, 1.02, asdict(ratio)))
    return found


def _step_by_hand(workload: Workload) -> None:
    """The loop that gets the same gradient by hand: four micro-batches, each weighted by its targets."""
    micro = [{key: value[start : start + 2] for key, value in workload.batch.items()} for start in range(0, 8, 2)]
    counts = [int((part["labels"][:, 1:] != -100).sum()) for part in micro]
    for part, count in zip(micro, counts, strict=True):
        loss = workload.model(**part, use_cache=False).loss * (count / sum(counts))
        loss.backward()
    for optimizer in workload.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _peak(workload: Workload, work: Callable[[], None], flags: str) -> int:
    """Peak of three steps, by the meter of a session under the plan that is in force or the empty one."""
    session = session_of(workload.model) or fit(workload, flags)
    try:
        return _peak_in(session, work)
    finally:
        if not flags:
            session.undo()


def _peak_in(session: Session, work: Callable[[], None]) -> int:
    """Peak of three steps, by a meter that watches a session."""
    workload = session.workload
    device = device_for(workload.device)
    meter = Meter(workload.model, workload.optimizers, device)
    session.observers.only([meter])
    try:
        for _ in range(3):
            work()
        return meter.measurement(memlab.Plan()).peak_allocated_bytes
    finally:
        session.observers.only([])
        meter.close()
        device.close()


def arithmetic(device: torch.device) -> list[Figure]:
    """What each technique leaves on the device, by category, against what its arithmetic says."""
    workload = gpt2(device, batch=8, tokens=128, small=True)
    training_step(workload)  # moments exist
    parameters = sum(p.numel() for p in workload.model.parameters())
    figures = []
    for flags, category, expected in (
        ("", Category.OPTIMIZER_STATE, 8.0),
        ("--adam8bit", Category.OPTIMIZER_STATE, 2.04),
        ("--precision pure-bf16", Category.OPTIMIZER_STATE, 4.0),
        ("--precision pure-bf16", Category.GRADIENTS, 2.0),
        ("--offload optimizer", Category.OPTIMIZER_STATE, 0.01),
    ):
        if category is Category.OPTIMIZER_STATE:
            # as a step has it: whoever looks at it afterwards on a GPU is given the loop's own form
            held_bytes = measure(workload, flags, steps=1).breakdown.get(category, 0)
        else:
            with fit(workload, flags):
                held_bytes = _gradient_bytes(workload)
        name = f"{flags or 'as written'}: bytes of {category} per parameter"
        figures.append(Figure(name, held_bytes / parameters, expected * 1.01, {"arithmetic": expected}))
    return figures


def _gradient_bytes(workload: Workload) -> int:
    workload.model(**workload.batch).loss.backward()
    size = sum(p.grad.untyped_storage().nbytes() for p in workload.model.parameters() if p.grad is not None)
    workload.model.zero_grad(set_to_none=True)
    return size


def techniques(device: torch.device) -> Comparison:
    """Every technique on the same steps: the table people see, on this machine."""
    workload = gpt2(device, batch=8, tokens=128)
    training_step(workload)
    plans = [
        "",
        "--accumulate 4",
        "--checkpoint",
        "--checkpoint selective",
        "--chunk-loss",
        "--bf16",
        "--precision pure-bf16",
        "--adam8bit",
        "--optim adafactor",
        "--offload optimizer",
        "--offload activations",
        "--accumulate 4 --checkpoint --bf16 --adam8bit --offload optimizer --chunk-loss",
    ]
    if device.type == "cuda":
        plans[5:5] = ["--fp16", "--precision tf32"]
        plans.insert(-3, "--optim paged-adam8bit")
    return memlab.compare(workload, plans, steps=3)
