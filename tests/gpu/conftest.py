"""Which tests say something on the emulated GPU, and how: with values, without them, or on hardware alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.emulated_gpu.unvalued import HAS_VALUES, IS_EMULATED, without_judgement


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skip, in words, what would say nothing here."""
    for item in items:
        if not IS_EMULATED or item.path.parent.name != "gpu":
            continue
        if (marker := item.get_closest_marker("hardware")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"only a real GPU can say: {marker.args[0]}"))
        elif item.get_closest_marker("memory") is not None:
            if HAS_VALUES:
                item.add_marker(pytest.mark.skip(reason="memory is counted without --values"))
        elif not HAS_VALUES:
            item.add_marker(pytest.mark.skip(reason="computes values: run it with --values"))


@pytest.fixture(autouse=True)
def _nothing_left_of_other_tests() -> None:
    """Free models in cycles: the allocator counts them wherever peaks are compared."""
    if torch.cuda.is_available():
        gc.collect()


@pytest.fixture(autouse=True)
def _no_judgement_without_values() -> Iterator[None]:
    with without_judgement():
        yield
