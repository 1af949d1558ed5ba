"""Every loop of `tests.stacks` under every setting: the same as untouched, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.needs import needs
from tests.stacks.running import outcomes, shell
from tests.stacks.several import ALL_STACKS


@pytest.fixture(scope="module")
def opened() -> Any:
    with shell() as opened:
        yield opened


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[needs(extra=package) for package in stack.packages])
        for name, stack in ALL_STACKS.items()
    ],
)
def test_a_stack_is_the_same_or_refused(name: str, opened: Any) -> None:
    found = outcomes(opened, ALL_STACKS[name])
    assert {flags: outcome for flags, outcome in found.items() if not outcome.is_good} == {}
    assert found[""].verdict == "same"
