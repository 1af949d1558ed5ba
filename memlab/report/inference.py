"""Calls that only run forward, in words: their receipt, and the lines below it."""

from __future__ import annotations

from memlab.records.inference import BatchAdvice, CacheUse, CallKind, InferenceRecord
from memlab.report.wording import rate
from memlab.units import format_bytes

_WATCHED = "every timed call was also measured for memory, which slows it down: make the same call twice in the cell to measure its speed"


def lines(record: InferenceRecord) -> tuple[str, ...]:
    """Return what a table has no columns for: the calls, the cache, notes."""
    said = [_calls(record)]
    if record.cache is not None:
        said.append(cache_line(record.cache))
    said += record.notes
    if all(call.observed for call in record.timed):
        said.append(_WATCHED)
    return tuple(said)


def cache_line(cache: CacheUse) -> str:
    """Return what a key-value cache took, beside what its formula says."""
    each = f", {format_bytes(cache.size_bytes / (cache.rows * cache.tokens))} a token" if cache.tokens else ""
    counted = f" × {cache.tokens} tokens" if cache.tokens else ""
    text = f"KV cache: {format_bytes(cache.size_bytes)} for {cache.rows} rows{counted}{each}"
    if cache.predicted_bytes is None:
        return f"{text}; the model's configuration gives no formula"
    text += f"; by its formula {format_bytes(cache.predicted_bytes)} = {cache.formula}"
    if cache.size_bytes > cache.predicted_bytes:
        text += "; its tensors lie in larger storages than their tokens need"
    return text


def batch_line(advice: BatchAdvice, record: InferenceRecord) -> str:
    """Return how many rows fit, and how that is known."""
    needs = f"{format_bytes(advice.fixed_bytes)} + {format_bytes(advice.row_bytes)} a row"
    budget = format_bytes(advice.budget_bytes)
    if not advice.rows:
        return f"batch: not one row fits into {budget} ({needs})"
    known = "two sizes" if len(advice.sizes) > 1 else f"{advice.sizes[0]} rows, all growth attributed to rows"
    how = "of as many tokens" if record.kind is CallKind.GENERATE or record.calls[0].tokens else "like these"
    return f"batch: up to {advice.rows:,} rows {how} fit into {budget} ({needs}, from {known})"


def graph_line(graph_bytes: int) -> str:
    """Return what gradients would have cost."""
    return (
        "gradients were on in the cell and are off in its calls: the graph of the largest one would have kept "
        f"{format_bytes(graph_bytes)}"
    )


def _calls(record: InferenceRecord) -> str:
    largest = max(record.calls, key=lambda call: (call.rows * max(1, call.tokens), call.rows))
    count = len(record.calls)
    tokens = f" × {largest.tokens} tokens" if largest.tokens else ""
    text = f"{record.kind}: {count:,} call{'' if count == 1 else 's'}, the largest of {largest.rows} rows{tokens}"
    if record.kind is CallKind.GENERATE:
        prefill, decode = rate(record.prefill_tokens_per_second), rate(record.decode_tokens_per_second)
        text += f"; prefill {prefill} tokens/s, decode {decode} new tokens/s"
    return text
