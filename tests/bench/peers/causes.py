"""Why memlab takes more, where it does: by pairing and measure, for the README and the page. Written by hand, after profiling."""

from __future__ import annotations

_OUTPUTS = (
    "the outputs of the parts are put together for a loop that may read them, and only those over 16 MiB wait until they are asked for; "
    "here the logits are 4 MiB, and so is the difference"
)
_COPY = (
    "a copy of the parameter that is being updated is kept, so that an update that breaks off can be undone; the embedding, the largest, "
    "is 3 MiB, and so is the difference"
)

CAUSES: dict[tuple[str, str], str] = {
    ("accumulation/hand", "peak_allocated_bytes"): _OUTPUTS,
    ("accumulation-trainer/trainer", "peak_allocated_bytes"): _OUTPUTS,
    ("bert-all-adafactor/trainer", "peak_allocated_bytes"): _COPY,
    ("chunk-loss/torch", "peak_allocated_bytes"): (
        "memlab's tiles are 32 MiB whatever the model, which here are all rows at once; torch's are 8 rows, and take the time that the "
        "column beside shows"
    ),
}
