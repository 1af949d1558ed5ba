"""Settings: what torch reads is read, what torch refuses is refused, in words that help."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.allocator import Settings
from memlab.errors import PlanError
from memlab.units import MIB


def test_the_defaults_are_torchs() -> None:
    # AllocatorConfig.h: max_split_size_ unlimited, large_segment_size_ 20 MiB, everything else off
    settings = Settings()
    assert settings == Settings.parse("") == Settings.parse("  ")
    assert settings.max_split_bytes == 2**64 - 1
    assert settings.large_segment_bytes == settings.unsplit_slack_bytes == 20 * MIB
    assert not settings.expandable_segments
    assert not settings.garbage_collection_threshold
    assert not any(settings.roundup_power2_divisions)
    assert settings.per_process_memory_fraction == 1
    assert str(settings) == ""


def test_every_key_that_matters() -> None:
    settings = Settings.parse(
        "max_split_size_mb:40, max_non_split_rounding_mb:30, garbage_collection_threshold:0.5,"
        "large_segment_size_mb:24, expandable_segments:True, per_process_memory_fraction:0.75,"
    )
    assert settings == Settings(
        expandable_segments=True,
        max_split_size_bytes=40 * MIB,
        max_non_split_rounding_bytes=30 * MIB,
        large_segment_bytes=24 * MIB,
        garbage_collection_threshold=0.5,
        per_process_memory_fraction=0.75,
    )


def test_the_large_segment_counts_wherever_it_stands() -> None:
    settings = Settings.parse("max_split_size_mb:64,large_segment_size_mb:32")
    assert settings.unsplit_slack_bytes == 32 * MIB


def test_divisions_by_interval() -> None:
    # the list of torch's AllocatorConfigTest: [64:8,…] holds from 0 to 64 MiB, intervals count from 2**i MiB,
    # and > fills what follows
    settings = Settings.parse("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]")
    assert settings.roundup_power2_divisions == (8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1)


def test_intervals_that_are_not_named_stay_undivided() -> None:
    divisions = Settings.parse("roundup_power2_divisions:[2:4,8:2]").roundup_power2_divisions
    assert divisions == (4, 4, 0, 2, *[0] * 12)


def test_intervals_above_64_gib_count_as_the_last() -> None:
    assert Settings.parse("roundup_power2_divisions:[1048576:2]").roundup_power2_divisions == (2,) * 16


def test_one_number_of_divisions_holds_everywhere() -> None:
    assert Settings.parse("roundup_power2_divisions:8").roundup_power2_divisions == (8,) * 16


def test_keys_without_effect_on_device_memory_are_read_over() -> None:
    text = (
        "backend:native,pinned_use_background_threads:True,release_lock_on_cudamalloc:True,throw_on_cudamalloc_oom:True"
    )
    assert Settings.parse(text) == Settings()


def test_a_key_given_twice_counts_the_second_time() -> None:
    assert Settings.parse("expandable_segments:True,expandable_segments:False") == Settings()


def test_the_environment() -> None:
    # PYTORCH_CUDA_ALLOC_CONF is "also supported with lower priority": Note [AcceleratorAllocatorConfig design]
    both = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:99", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert Settings.from_environment(both) == Settings(expandable_segments=True)
    assert Settings.from_environment({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:99"}).max_split_bytes == 99 * MIB
    assert Settings.from_environment({"HOME": "/"}) == Settings()


REFUSED = {
    "max_split_size:128": "allocator setting 'max_split_size': unknown; did you mean max_split_size_mb?",
    "zzz:1": (
        "allocator setting 'zzz': unknown; known are backend, expandable_segments, garbage_collection_threshold, "
        "graph_capture_record_stream_reuse, large_segment_size_mb, max_non_split_rounding_mb, max_split_size_mb, "
        "per_process_memory_fraction, pinned_free_catch_all, pinned_num_register_threads, "
        "pinned_reserve_segment_size_mb, pinned_use_background_threads, pinned_use_cuda_host_register, "
        "release_lock_on_cudamalloc, roundup_power2_divisions, throw_on_cudamalloc_oom"
    ),
    "max_split_size_mb:19": (
        "allocator setting max_split_size_mb:19: expected 20 or more, the size of a large segment in MiB"
    ),
    "max_split_size_mb:-1": "allocator setting max_split_size_mb:-1: expected a whole number",
    "max_non_split_rounding_mb:30,large_segment_size_mb:40": (
        "allocator setting max_non_split_rounding_mb:30: expected 40 or more, the size of a large segment in MiB"
    ),
    "large_segment_size_mb:10": "allocator setting large_segment_size_mb:10: expected more than 10",
    "garbage_collection_threshold:0": (
        "allocator setting garbage_collection_threshold:0: expected more than 0 and less than 1"
    ),
    "garbage_collection_threshold:1": (
        "allocator setting garbage_collection_threshold:1.0: expected more than 0 and less than 1"
    ),
    "garbage_collection_threshold:nan": (
        "allocator setting garbage_collection_threshold:nan: expected more than 0 and less than 1"
    ),
    "garbage_collection_threshold:much": (
        "allocator setting garbage_collection_threshold:much: expected a number between 0 and 1"
    ),
    "per_process_memory_fraction:1.5": (
        "allocator setting per_process_memory_fraction:1.5: expected a number from 0 to 1"
    ),
    "expandable_segments:true": "allocator setting expandable_segments:true: expected True or False",
    "backend:cudaMallocAsync": (
        "allocator setting backend:cudaMallocAsync: expected native; "
        "cudaMallocAsync is another allocator, which is not simulated"
    ),
    "roundup_power2_divisions:3": (
        "allocator setting roundup_power2_divisions:3: expected a power of two, or a list as in [256:4,1024:2,>:1]"
    ),
    "roundup_power2_divisions:[3:2]": (
        "allocator setting roundup_power2_divisions:[3:2]: expected MiB:parts or >:parts, "
        "powers of two (or 0 parts), as in [256:4,1024:2,>:1], at '3:2'"
    ),
    "roundup_power2_divisions:[256:3]": (
        "allocator setting roundup_power2_divisions:[256:3]: expected MiB:parts or >:parts, "
        "powers of two (or 0 parts), as in [256:4,1024:2,>:1], at '256:3'"
    ),
    "max_split_size_mb": (
        "allocator settings 'max_split_size_mb': expected key:value pairs with commas between them, "
        "as in 'max_split_size_mb:128,expandable_segments:True', at 'max_split_size_mb'"
    ),
    "expandable_segments:True;max_split_size_mb:128": (
        "allocator settings 'expandable_segments:True;max_split_size_mb:128': expected key:value pairs with commas "
        "between them, as in 'max_split_size_mb:128,expandable_segments:True', "
        "at 'expandable_segments:True;max_split_size_mb:128'"
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_torch_refuses_is_refused(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        Settings.parse(text)
    assert str(caught.value) == REFUSED[text]


def test_values_given_as_numbers_are_checked_too() -> None:
    with pytest.raises(PlanError) as caught:
        Settings(max_split_size_bytes=64 * MIB + 1)
    assert str(caught.value).startswith("allocator setting max_split_size_mb:64.0000009")
    assert str(caught.value).endswith("expected a whole number of MiB")
    with pytest.raises(PlanError) as caught:
        Settings(roundup_power2_divisions=(2, 3))
    assert str(caught.value) == (
        "allocator setting roundup_power2_divisions:[2, 3]: expected 16 numbers of parts, each 0 or a power of two"
    )


POWERS = st.sampled_from([0, 1, 2, 4, 8, 16])
SETTINGS = st.builds(
    Settings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.none() | st.integers(64, 4096).map(lambda mebibytes: mebibytes * MIB),
    max_non_split_rounding_bytes=st.none() | st.integers(64, 4096).map(lambda mebibytes: mebibytes * MIB),
    large_segment_bytes=st.integers(11, 64).map(lambda mebibytes: mebibytes * MIB),
    garbage_collection_threshold=st.floats(0, 1, exclude_max=True),
    roundup_power2_divisions=st.tuples(*[POWERS] * 16),
    per_process_memory_fraction=st.floats(0, 1),
)


@given(SETTINGS)
def test_what_is_printed_is_read(settings: Settings) -> None:
    assert Settings.parse(str(settings)) == settings
