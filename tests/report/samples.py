"""Records as a real run leaves them: GPT-2 124M, batch 8 × 512, four settings."""

from __future__ import annotations

from dataclasses import replace

from memlab.records import Comparison, Measurement, Phase, TimelinePoint
from memlab.units import GIB

TITLE = "memfit · model gpt2 124M · AdamW · batch 8 × 512 · CPU ledger (capacity 16 GiB) · 12 steps"
DEVICE = "CPU ledger (capacity 16 GiB)"
EVENT = "step 7: out of memory (needed 1.20 GiB, 0.31 free) → accumulation 4 → 8, same batch redone, 0 steps lost"
LONG_PLAN = "--accumulate 4 --checkpoint every:2 --bf16 --optim paged-adam8bit --offload activations:disk --chunk-loss"


def timeline(activations_gib: float, micro_batches: int = 1) -> tuple[TimelinePoint, ...]:
    """One step in forward, backward and update, with the ramps of a real one."""
    points = [TimelinePoint(0.0, Phase.OTHER, _live(0, 0, 0))]
    for batch in range(micro_batches):
        for i in range(12):
            live = _live(activations_gib * i / 11, batch, i % 3)
            points.append(TimelinePoint(len(points) * 0.02, Phase.FORWARD, live))
        for i in range(24):
            grown = 0.46 * min(1.0, i / 20 + batch)
            live = _live(activations_gib * (1 - i / 23), grown, 2 * (i < 3))
            points.append(TimelinePoint(len(points) * 0.02, Phase.BACKWARD, live))
    points += [TimelinePoint((len(points) + i) * 0.02, Phase.STEP, _live(0, 0.46, i % 2)) for i in range(5)]
    return tuple(points)


def _live(activations: float, gradients: float, temporaries: float) -> dict[str, int]:
    gib = {
        "parameters": 0.46,
        "gradients": min(0.46, gradients),
        "optimizer state": 0.93,
        "activations": activations,
        "temporaries": 0.2 * temporaries,
    }
    return {name: int(size * GIB) for name, size in gib.items()}


def measurement(plan: str, activations_gib: float, samples_per_second: float, micro_batches: int = 1) -> Measurement:
    """A measurement whose peak, breakdown and timeline agree."""
    points = timeline(activations_gib, micro_batches)
    peak = max(points, key=lambda point: point.total_bytes)
    middle = 8 / samples_per_second
    return Measurement(
        plan=plan,
        device=DEVICE,
        peak_allocated_bytes=peak.total_bytes,
        peak_reserved_bytes=None,
        host_bytes=0,
        breakdown=peak.live_bytes,
        timeline=points,
        step_seconds=(middle * 0.98, middle, middle * 1.03),
        samples_per_step=8,
        tokens_per_step=8 * 512,
        losses=(10.9, 10.2, 9.8),
    )


def comparison() -> Comparison:
    first = measurement("as written", 9.1, 1.31)
    accumulated = replace(measurement("--accumulate 4", 2.8, 1.27, 4), losses=(10.9, 10.2, 9.800002))
    checkpointed = replace(
        measurement("--accumulate 4 --checkpoint", 1.1, 0.98, 4),
        notes=("the peak is now in the loss: try --chunk-loss",),
    )
    worse = replace(measurement("--offload optimizer", 9.2, 1.1), host_bytes=GIB)
    return Comparison(TITLE, (first, accumulated, checkpointed, worse), (EVENT,))


def crowded() -> Comparison:
    """Every column there is, a plan of many flags, a part of the peak that no category explains."""
    rows = [
        replace(m, peak_reserved_bytes=m.peak_allocated_bytes + GIB // 2, driver_bytes=m.peak_allocated_bytes + GIB)
        for m in comparison().measurements
    ]
    last = replace(
        measurement(LONG_PLAN, 0.8, 1.53, 4),
        peak_reserved_bytes=int(3.3 * GIB),
        peak_allocated_bytes=int(3.1 * GIB),
        host_bytes=GIB // 3,
        notes=(("chunked loss refused: this model computes its loss outside of the head; use it with a causal language "
               "model"),),
    )  # fmt: skip
    return Comparison(TITLE, (*rows, last), (EVENT,))
