"""Settings: what torch reads is read."""

from __future__ import annotations

import pytest

from memlab.allocator import Settings
from memlab.units import MIB


def test_the_defaults_are_torchs() -> None:
    # AllocatorConfig.h: max_split_size_ unlimited, large_segment_size_ 20 MiB, everything else off
    settings = Settings()
    assert settings == Settings.parse("") == Settings.parse("  ")
    assert settings.max_split_bytes == 2**64 - 1
    assert settings.large_segment_bytes == settings.unsplit_slack_bytes == 20 * MIB
    assert not settings.expandable_segments
    assert not any(settings.roundup_power2_divisions)


def test_every_key_that_matters() -> None:
    settings = Settings.parse(
        "max_split_size_mb:40, max_non_split_rounding_mb:30, large_segment_size_mb:24, expandable_segments:True,"
    )
    assert settings == Settings(
        expandable_segments=True,
        max_split_bytes=40 * MIB,
        max_non_split_rounding_bytes=30 * MIB,
        large_segment_bytes=24 * MIB,
    )


def test_the_large_segment_counts_wherever_it_stands() -> None:
    settings = Settings.parse("max_split_size_mb:64,large_segment_size_mb:32")
    assert settings.unsplit_slack_bytes == 32 * MIB


def test_divisions_by_interval() -> None:
    # the list of torch's AllocatorConfigTest: [64:8,…] holds from 0 to 64 MiB, intervals count from 2**i MiB,
    # and > fills what follows
    settings = Settings.parse("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],expandable_segments:True")
    assert settings.roundup_power2_divisions == (8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1)
    assert settings.expandable_segments


def test_intervals_that_are_not_named_stay_undivided() -> None:
    divisions = Settings.parse("roundup_power2_divisions:[2:4,8:2]").roundup_power2_divisions
    assert divisions == (4, 4, 0, 2, *[0] * 12)


def test_intervals_above_64_gib_count_as_the_last() -> None:
    assert Settings.parse("roundup_power2_divisions:[1048576:2]").roundup_power2_divisions == (2,) * 16


def test_one_number_of_divisions_holds_everywhere() -> None:
    assert Settings.parse("roundup_power2_divisions:8").roundup_power2_divisions == (8,) * 16


@pytest.mark.parametrize("text", ["backend:native,pinned_use_background_threads:True", "something_new:[1:2]"])
def test_keys_without_effect_on_device_memory_are_passed_over(text: str) -> None:
    assert Settings.parse(text) == Settings()
    assert Settings.parse(text).text == text


def test_a_key_given_twice_counts_the_second_time() -> None:
    assert Settings.parse("expandable_segments:True,expandable_segments:False") == Settings()


def test_the_environment() -> None:
    # PYTORCH_CUDA_ALLOC_CONF is "also supported with lower priority": Note [AcceleratorAllocatorConfig design]
    both = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:99", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert Settings.from_environment(both) == Settings(expandable_segments=True)
    assert Settings.from_environment({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:99"}).max_split_bytes == 99 * MIB
    assert Settings.from_environment({"HOME": "/"}) == Settings()


def test_what_torch_would_refuse_counts_as_nothing() -> None:
    assert Settings.from_environment({"PYTORCH_ALLOC_CONF": "max_split_size_mb:much"}) == Settings()
