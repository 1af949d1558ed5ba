"""Records as a real run leaves them: GPT-2 124M, batch 8 × 512, four settings."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from memlab.plan import Plan
from memlab.records import Measurement, Phase, Prediction, TimelinePoint, out_of_memory
from memlab.records.comparison import Comparison, FoundPlan
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
        step_seconds=(middle * 0.98, middle, middle, middle, middle * 1.03),
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


def prediction(
    plan: str, peak_gib: float, samples_per_second: float, *, error: float = 0.01, slack: float = 0.15, **more: object
) -> Prediction:
    """A prediction with a breakdown; a peak known to `error`, a speed known to `slack`."""
    peak_bytes, seconds = int(peak_gib * GIB), 8 / samples_per_second
    state = {"parameters": 0.46, "gradients": 0.46, "optimizer state": 0.93}
    parts = {name: int(min(size, peak_gib / 3) * GIB) for name, size in state.items()}
    parts["activations"] = peak_bytes - sum(parts.values())
    base = Prediction(
        plan, "H100 SXM", peak_bytes, None, 0, parts, (), seconds, 8, 8 * 512,
        (int(peak_bytes * (1 - error)), int(peak_bytes * (1 + error))), (seconds * (1 - slack), seconds * (1 + slack)),
    )  # fmt: skip
    return replace(base, **more)  # type: ignore[arg-type]


def refused(plan: str, reason: str) -> Prediction:
    """A plan that does not apply: it has no numbers."""
    return Prediction(plan, "H100 SXM", 0, None, 0, {}, (), float("nan"), 0, 0, (0, 0), (0.0, 0.0), refused=reason)


def plan_space() -> list[Prediction]:
    """432 predictions that trade memory for speed, 132 of them refused for two reasons."""
    settings = product(
        (1, 2, 4, 8),
        ("", "--checkpoint", "--checkpoint selective"),
        ("", "--bf16", "--precision pure-bf16"),
        ("", "--adam8bit"),
        ("", "--offload activations", "--offload optimizer"),
        ("", "--chunk-loss"),
    )
    return [_point(*setting) for setting in settings]


def _point(accumulate: int, checkpoint: str, precision: str, optimizer: str, offload: str, loss: str) -> Prediction:
    split = f"--accumulate {accumulate}" if accumulate > 1 else ""
    label = " ".join(flag for flag in (split, checkpoint, precision, optimizer, offload, loss) if flag)
    if offload == "--offload optimizer" and optimizer:
        return refused(label, "offload: the 8-bit state is small, and paged already; drop one of the two")
    if accumulate == 8 and checkpoint:
        return refused(label, "accumulation: --accumulate 8 needs at least 8 rows in a batch of GPT2, this one has 4")
    activations = 7.2 / accumulate * {"": 1.0, "--checkpoint": 0.22, "--checkpoint selective": 0.5}[checkpoint]
    activations *= {"": 1.0, "--bf16": 0.62, "--precision pure-bf16": 0.5}[precision]
    logits = (0.2 if loss else 1.9) / accumulate
    state = (0.46 if precision == "--precision pure-bf16" else 0.93) * 2
    state -= {"": 0.0, "--adam8bit": 0.69}[optimizer]
    if offload == "--offload optimizer":
        state -= 0.9
    if offload == "--offload activations":
        activations *= 0.3
    speed = (
        1.31 * (0.985 ** (accumulate - 1)) * {"": 1.0, "--checkpoint": 0.76, "--checkpoint selective": 0.92}[checkpoint]
    )
    speed *= {"": 1.0, "--bf16": 1.9, "--precision pure-bf16": 1.95}[precision] * (0.97 if loss else 1.0)
    speed *= {"": 1.0, "--offload activations": 0.7, "--offload optimizer": 0.8}[offload] * (0.99 if optimizer else 1.0)
    host_bytes = int(0.93 * GIB) if offload else 0
    return prediction(label or "as written", activations + logits + state, speed, host_bytes=host_bytes)


def found() -> FoundPlan:
    """A plan that was found in two trials, the first of which ran out of memory."""
    predictions = tuple(plan_space())
    tight, good = "--bf16 --chunk-loss", "--accumulate 2 --bf16 --chunk-loss"
    failed = replace(
        out_of_memory(Plan.parse(tight), DEVICE, 4 * GIB, "Tried to allocate 393.00 MiB"), device="NVIDIA H100"
    )
    proven = replace(measurement(good, 1.9, 2.3), peak_allocated_bytes=int(3.87 * GIB), device="NVIDIA H100")
    return FoundPlan("gpt2 124M · AdamW · cuda:0", 4 * GIB, Plan.parse(good), proven, (failed, proven), predictions)


def on_page(png: bytes, page: str = "#FFFFFF") -> Any:
    """A picture as a page of this colour shows it."""
    pictures = pytest.importorskip("PIL.Image")
    drawn = pictures.open(io.BytesIO(png)).convert("RGBA")
    shown = pictures.new("RGBA", drawn.size, page)
    shown.alpha_composite(drawn)
    return shown.convert("RGB")


def share_of(colour: str, png: bytes, near: int = 8) -> float:
    """Share of a picture's pixels in nearly this colour, on a white page."""
    picture = on_page(png)
    found = (
        count
        for count, value in picture.getcolors(maxcolors=2**24)
        if max(abs(a - b) for a, b in zip(value, channels(colour), strict=True)) <= near
    )
    return float(sum(found)) / (picture.width * picture.height)


def channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def luminance(colour: str) -> float:
    """How light a colour is, as WCAG 2 defines it."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in channels(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
