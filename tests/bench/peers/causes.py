"""Why memlab takes more, where it does: by pairing and measure, for `docs/compared.md` and `docs/peers.html`. Written by hand, after profiling."""

from __future__ import annotations

_COPY = (
    "a copy of the parameter that is being updated is kept, so that an update that breaks off can be undone; the embedding, the largest, "
    "is 3 MiB, and so is the difference"
)

_BUCKETS = (
    "the update goes bucket by bucket, each copied first so that an update that breaks off can be undone. Profiled in one process, "
    "in turns: {own} of CPU time a step against {peer}; the copies are {copies} of it, the rest is 23 calls of the update instead of one"
)
_RECOMPUTATION = "not found again when both run in one process, in turns (256 ms of CPU time a step against 250): the rounds differ by more than this"
_FINDING = (
    "the search traces the model, predicts every plan and then runs {trials} trials under a ledger, where the peer lowers the batch until one "
    "passes; it keeps the whole batch, the peer does not"
)

CAUSES: dict[tuple[str, str], str] = {
    ("bert-all-adafactor/trainer", "peak_allocated_bytes"): _COPY,
    ("bert-accumulation-checkpointing/trainer", "sample_seconds"): _RECOMPUTATION,
    ("bert-adafactor/trainer", "sample_seconds"): _BUCKETS.format(own="115 ms", peer="111 ms", copies="1.5 ms"),
    ("bert-all-8bit/trainer", "sample_seconds"): _BUCKETS.format(own="267 ms", peer="249 ms", copies="2.3 ms"),
    ("offload-optimizer/as-written", "sample_seconds"): (
        "state on the device is not an offload; here it comes from a file and goes back to it in every step, for 0.78 of the memory"
    ),
    ("finding/accelerate", "find_seconds"): _FINDING.format(trials=3),
    ("finding/lightning", "find_seconds"): _FINDING.format(trials=3),
}
