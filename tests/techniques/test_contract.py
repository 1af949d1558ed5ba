"""Techniques are what they say: a moment of a mechanism that nobody asks a technique for would be passed by in silence."""

from __future__ import annotations

import inspect

import pytest

from memlab.runtime import mechanisms
from memlab.techniques import TECHNIQUES, Technique

_MECHANISMS = [
    kind
    for _, kind in inspect.getmembers(mechanisms, inspect.isclass)
    if kind.__module__ == mechanisms.__name__ and kind not in (mechanisms.AsWritten, mechanisms.Bringing)
]
_MOMENTS = {
    name: kind
    for kind in _MECHANISMS
    for name in vars(kind)
    if not name.startswith("_") and name not in vars(Technique)
}


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_moments_of_a_mechanism_are_defined_by_techniques_that_are_one(technique: type[Technique]) -> None:
    for kind in technique.__mro__:
        for name in vars(kind):
            if name in _MOMENTS and kind not in _MECHANISMS:
                assert issubclass(technique, _MOMENTS[name]), f"{kind.__name__}.{name} needs {_MOMENTS[name].__name__}"


def test_there_are_moments_to_look_for() -> None:
    assert {"pack_state", "bucket_coming", "at_home", "whole_step", "check_loop", "host_bytes"} <= _MOMENTS.keys()
