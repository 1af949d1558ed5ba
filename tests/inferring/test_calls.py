"""What is measured of calls: which are one, what is observed, caches to the byte."""

from __future__ import annotations

import pytest
import torch

from memlab.inferring import cache
from memlab.inferring.inference import inference
from memlab.measuring.device import Device
from memlab.records import Category
from memlab.units import KIB
from tests.inferring.small_models import CACHE, PROMPT, VOCABULARY, generate, gpt2, llama, mistral, plain, t5


def bytes_per_token(heads: int, element_bytes: int = 4) -> int:
    """Keys and values of 2 layers, with heads of 8."""
    return 2 * 2 * heads * 8 * element_bytes


@pytest.mark.parametrize(("make", "heads"), [(gpt2, 4), (llama, 2)])
@pytest.mark.parametrize(("flags", "element_bytes"), [("", 4), ("--bf16", 2)])
def test_caches_are_measured_and_predicted_to_the_byte(make, heads: int, flags: str, element_bytes: int) -> None:
    model = make()
    with inference(model, flags) as run:
        generate(model, new=10)
    # the last token that comes out is never fed
    expected = bytes_per_token(heads, element_bytes) * 21 * 2
    used = run.record.cache
    assert (used.size_bytes, used.predicted_bytes, used.rows, used.tokens) == (expected, expected, 2, 21)
    assert run.record.calls[0].cache_bytes == expected
    assert run.record.breakdown[Category.CACHE] <= expected


def test_grouped_heads_are_in_the_formula() -> None:
    with inference(model := llama()) as run:
        generate(model)
    assert run.record.cache.formula == "2 × 2 layers × 2 heads × 8 × 4 B × 21 tokens × 2 rows"


def test_beams_are_rows_of_the_cache() -> None:
    model = gpt2()
    with inference(model) as run:
        model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=5, num_beams=3, do_sample=False)
    assert run.record.cache.rows == 6
    assert run.record.cache.size_bytes == run.record.cache.predicted_bytes == bytes_per_token(4) * 16 * 6
    assert (run.record.calls[0].rows, run.record.calls[0].new_tokens) == (2, 10)


def test_the_tokens_of_an_encoder_are_kept_as_well() -> None:
    model = t5()
    with inference(model) as run:
        generate(model, new=10)
    assert run.record.calls[0].new_tokens == 20
    assert run.record.cache.size_bytes == run.record.cache.predicted_bytes == bytes_per_token(4) * (10 + 12) * 2


def test_windows_keep_no_more_than_their_tokens() -> None:
    shape = cache.shape_of(mistral(window=8))
    assert shape.windows == (7, 7)
    assert shape.use(0, 2, 100, 0, torch.float32).predicted_bytes == bytes_per_token(2) * 7 * 2
    assert shape.use(0, 2, 5, 0, torch.float32).predicted_bytes == bytes_per_token(2) * 5 * 2


def test_a_model_without_a_known_form_of_cache_has_no_formula() -> None:
    assert cache.shape_of(plain()) is None
    model = llama()
    model.config.kv_lora_rank = 16
    assert cache.shape_of(model) is None


def test_a_static_cache_is_measured_as_large_as_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    model = llama()
    held = transformers.StaticCache(config=model.config, max_cache_len=64)
    with inference(model) as run:
        model(PROMPT, **{CACHE: held})
    assert run.record.cache.size_bytes >= bytes_per_token(2) * 64 * 2
    assert run.record.cache.predicted_bytes == bytes_per_token(2) * 12 * 2


def decode(model: torch.nn.Module, passes: int, prompt: torch.Tensor = PROMPT) -> None:
    """A loop of the user's own."""
    past, tokens = None, prompt
    for _ in range(passes):
        output = model(tokens, **{CACHE: past}, use_cache=True)
        past, tokens = output[CACHE], output.logits[:, -1:].argmax(-1)


def test_a_loop_that_hands_its_cache_on_is_one_generation() -> None:
    model = gpt2()
    with inference(model) as run:
        decode(model, 6)
        decode(model, 4)
        model(PROMPT)
    forwards = next(record for record in run.records if record.kind == "forward")
    generations = next(record for record in run.records if record.kind == "generate")
    assert len(forwards.calls) == 1
    assert [(c.passes, c.new_tokens) for c in generations.calls] == [(6, 12), (4, 8)]
    assert generations.cache.size_bytes == generations.cache.predicted_bytes == bytes_per_token(4) * 17 * 2


def test_a_cache_from_before_counts_the_tokens_in_it() -> None:
    model = gpt2().eval()
    with torch.no_grad():
        past = model(PROMPT, use_cache=True)[CACHE]
    with inference(model) as run:
        model(PROMPT[:, :1], **{CACHE: past})
    assert run.record.cache.tokens == 13
    assert run.record.cache.size_bytes == run.record.cache.predicted_bytes


def test_nothing_is_kept_for_each_token() -> None:
    with inference(model := gpt2()) as run:
        generate(model, new=40)
    (call,) = run.record.calls
    assert call.passes == 40
    assert len(run.record.timeline) <= 300


# -- what is observed --------------------------------------------------------------------------


def test_calls_no_larger_than_observed_ones_are_timed_without_a_ledger() -> None:
    model = plain()
    with inference(model) as run:
        for rows in (4, 4, 2, 2, 8, 4):
            model(torch.randn(rows, 16))
    assert [(c.rows, c.observed) for c in run.record.calls] == [
        (4, True), (4, False), (2, True), (2, False), (8, True), (4, False),
    ]  # fmt: skip
    assert {c.observed for c in run.record.timed} == {False}


def test_a_generation_that_outgrows_what_was_observed_is_observed_from_there() -> None:
    model = gpt2()
    with inference(model) as run:
        for new in (4, 4, 20):
            generate(model, new=new)
    first, second, third = run.record.calls
    assert (first.observed, second.observed, third.observed) == (True, False, True)
    assert second.peak_allocated_bytes is None
    assert third.peak_allocated_bytes > 0
    # the first prompt and mask are known, still alive, and no inputs of a later pass
    assert 0 <= third.fixed_bytes - first.fixed_bytes <= 2 * PROMPT.nbytes


def test_a_device_with_a_capacity_observes_every_call_and_runs_out() -> None:
    model = plain()
    with inference(model, device=Device(64 * KIB)) as run:
        model(torch.randn(4, 16))
        model(torch.randn(4, 16))
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.randn(400, 16))
        model(torch.randn(4, 16))
    assert [(c.rows, c.observed) for c in run.record.calls] == [(4, True)] * 3
    assert run.record.device == "CPU ledger (capacity 64.0 KiB)"


def test_peak_and_breakdown_of_a_forward_are_what_a_ledger_sees() -> None:
    model, inputs = plain().eval(), torch.randn(6, 16)
    ledger = Device().ledger()
    ledger.begin([(Category.PARAMETERS, p) for p in model.parameters()] + [(Category.ACTIVATIONS, inputs)])
    with ledger, torch.no_grad():
        model(inputs)
    with inference(model) as run:
        model(inputs)
    size = sum(4 * p.numel() for p in model.parameters())
    assert run.record.peak_allocated_bytes == ledger.peak_bytes == sum(run.record.breakdown.values())
    assert run.record.breakdown[Category.PARAMETERS] == run.record.calls[0].fixed_bytes == size
    assert run.record.breakdown[Category.ACTIVATIONS] == inputs.nbytes


def test_sampling_between_passes_is_within_the_peak_of_generate() -> None:
    """Beams are put into another order between two passes: keys and values are then held twice."""
    model = gpt2()
    with inference(model) as run:
        model.generate(
            PROMPT[:1], attention_mask=torch.ones_like(PROMPT[:1]), max_new_tokens=30, num_beams=6, do_sample=False
        )
    parameters = run.record.breakdown[Category.PARAMETERS]
    assert run.record.peak_allocated_bytes > parameters + run.record.cache.size_bytes


class Counting(Device):
    """Counts by itself, as CUDA's allocator does: two readings of a counter for each call of a plain model."""

    def __init__(self, readings: list[tuple[int, int]]) -> None:
        super().__init__()
        self._readings = iter(readings)

    def peaks(self, observed_bytes: int | None) -> tuple[int | None, int | None]:
        assert observed_bytes is None
        return next(self._readings)


def test_a_device_that_counts_by_itself_needs_no_ledger() -> None:
    model = plain()
    size = sum(4 * p.numel() for p in model.parameters())
    inputs = torch.randn(4, 16)
    readings = [(0, 0)]  # asked once, whether it counts
    for peak in (6000, 9000, 7000):
        readings += [(size + inputs.nbytes, 10_000), (peak, 10_000)]
    with inference(model, device=Counting(readings)) as run:
        for _ in range(3):
            model(inputs)
    assert [(c.peak_allocated_bytes, c.observed, c.fixed_bytes) for c in run.record.calls] == [
        (6000, False, size), (9000, False, size), (7000, False, size),
    ]  # fmt: skip
    assert run.record.breakdown == {
        "parameters": size,
        "temporaries": 9000 - size,
        "unused but reserved": 1000,
    }
    assert run.record.timeline == ()
    assert run.record.calls[0].peak_reserved_bytes == 10_000


def test_a_call_that_raises_is_forgotten_and_the_next_one_measured() -> None:
    model = gpt2()
    with inference(model) as run:
        with pytest.raises(IndexError):
            model(torch.full((3, 4), VOCABULARY + 1))
        with pytest.raises(ValueError):
            model.generate(PROMPT, max_new_tokens=-1)
        generate(model)
    assert [(c.kind, c.rows) for record in run.records for c in record.calls] == [("generate", 2)]


def test_a_kept_output_counts_as_what_was_there_before() -> None:
    model = plain()
    with inference(model, device=Device(10**9)) as run:
        kept = [model(torch.randn(8, 16)) for _ in range(3)]
    first, second, third = (call.fixed_bytes for call in run.record.calls)
    assert third - second == second - first == kept[0].nbytes
