"""What a result keeps alive."""

from __future__ import annotations

import torch
from torch import nn

from memlab.workshop import held_by, here


def held_bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in held_by(*tensors))


def test_a_loss_holds_its_forward_pass_until_the_backward_pass() -> None:
    work = here()
    model, batch = work.gpt2(n_layer=2), next(work.batches())
    loss = model(input_ids=batch, labels=batch).loss
    before = held_bytes(loss)
    assert before > 4 * work.rows * work.tokens * work.width * 10
    other = model(input_ids=batch, labels=batch).loss
    assert held_bytes(loss + other) > 1.9 * before
    loss.backward()
    assert held_bytes(loss) < 100
    with torch.no_grad():
        assert held_by(model(input_ids=batch, labels=batch).loss) == []


def test_parameters_do_not_count_and_memory_counts_once() -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    out = layer(x)
    assert [each.shape for each in held_by(out)] == [x.shape]
    assert len(held_by(layer(x) + layer(x))) == 1


def test_a_transposed_view_of_a_weight_does_not_count_either() -> None:
    layers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False))
    x = torch.randn(2, 4, 8)
    assert held_bytes(layers(x)) == 2 * x.nbytes  # what goes into each layer
