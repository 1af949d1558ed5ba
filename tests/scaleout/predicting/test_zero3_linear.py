"""Linear layers as ZeRO 3 computes them: the same numbers, and nothing kept but what came in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab.scaleout.predicting.zero3_linear import linear_as_in_stage_3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3)])
def test_gradients_are_those_of_a_plain_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(3, 2, bias=bias)
    x = torch.randn(shape, requires_grad=True)
    wanted = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    with linear_as_in_stage_3():
        found = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(found, wanted)


def test_under_autocast_the_weight_itself_is_kept() -> None:
    layer, kept = nn.Linear(3, 2), []
    x = torch.randn(5, 3)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each), torch.autocast("cpu", torch.bfloat16):
        layer(x)
        assert not any(each is layer.weight for each in kept)
        kept.clear()
        with linear_as_in_stage_3():
            layer(x)
    assert {each.data_ptr() for each in kept} == {each.data_ptr() for each in (x, layer.weight, layer.bias)}
