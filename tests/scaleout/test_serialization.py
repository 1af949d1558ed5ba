"""Objects packed for other processes."""

from __future__ import annotations

import torch
from torch import nn

from memlab.scaleout.serialization import pack, unpack


def test_tensors_that_travel_apart_leave_placeholders_and_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    weight = model[0].weight
    weight.requires_grad_(False)
    packed = pack({"model": model, "weight": weight, "batch": torch.arange(4)}, [weight])
    opened = unpack(packed)
    assert opened["weight"].is_meta
    assert opened["weight"].shape == (3, 3)
    assert opened["model"][1].weight is opened["model"][0].weight is opened["weight"]
    assert isinstance(opened["weight"], nn.Parameter)
    assert not opened["weight"].requires_grad
    assert opened["batch"].tolist() == [0, 1, 2, 3]


def test_functions_travel_with_what_they_use() -> None:
    offset = 3
    opened = unpack(pack({"add": lambda x: x + offset}))
    assert opened["add"](4) == 7
