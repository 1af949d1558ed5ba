"""Why memlab takes more, where it does: by pairing and measure, for the README and the page. Written by hand, after profiling."""

from __future__ import annotations

_COPY = (
    "a copy of the parameter that is being updated is kept, so that an update that breaks off can be undone; the embedding, the largest, "
    "is 3 MiB, and so is the difference"
)

_UNKNOWN = "a few per cent in a step of a fraction of a second, in every round; not profiled yet"

CAUSES: dict[tuple[str, str], str] = {
    ("bert-all-adafactor/trainer", "peak_allocated_bytes"): _COPY,
    ("bert-all-adafactor/trainer", "sample_seconds"): _UNKNOWN,
    ("bert-adafactor/trainer", "sample_seconds"): _UNKNOWN,
    ("checkpointing/transformers", "sample_seconds"): _UNKNOWN,
    ("release-grads/torch", "sample_seconds"): _UNKNOWN,
}
