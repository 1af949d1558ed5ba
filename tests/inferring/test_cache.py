"""Finding the tensors of a cache."""

from __future__ import annotations

import torch

from memlab.inferring.cache import bytes_of, caches_in, is_cache, tensors_of
from tests.inferring.small_models import PROMPT, gpt2


class Held:
    """A cache of somebody's own, that refers to itself."""

    def __init__(self) -> None:
        self.states = {"conv": [torch.zeros(2, 3)], "ssm": (torch.zeros(2, 5),)}
        self.me = self
        self.model = torch.nn.Linear(100, 100)


def test_any_object_is_looked_into_once_and_models_are_not() -> None:
    assert sorted(tensor.numel() for tensor in tensors_of(Held())) == [6, 10]


def test_views_of_a_storage_are_counted_once() -> None:
    whole = torch.zeros(8, 4)
    assert bytes_of([whole[:2], whole[2:], torch.zeros(2)], "cpu") == 8 * 4 * 4 + 8
    assert bytes_of([whole], "cuda") == 0


def test_caches_are_known_by_name_or_by_type() -> None:
    output = gpt2()(PROMPT, use_cache=True)
    assert caches_in(output) == [output.past_key_values]
    assert is_cache(output.past_key_values)
    assert caches_in(output.to_tuple()) == [output.past_key_values]
    for name in ("cache_params", "cache"):  # the latter is Transformers' since 5.24
        assert caches_in({name: (held := Held()), "past_key_values": None}) == [held]
    assert caches_in(torch.zeros(2)) == []
