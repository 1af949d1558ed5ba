"""Forms that techniques give optimizer state: in, out, below one another, and through checkpoints."""

from __future__ import annotations

import pytest
import torch

from memlab.runtime.state_layers import apply_layer, canonical_state_dict, pack_loaded, remove_layer
from tests.driving import Doubling, FailingAt, same, snapshot, with_gradients


def test_a_layer_goes_in_and_out_below_others() -> None:
    log: list[str] = []
    below, above = Doubling("below", log, per_step=True), Doubling("above", log, per_step=True)
    model, optimizer = with_gradients(torch.optim.AdamW)
    optimizer.step()
    before = snapshot(model, optimizer)
    apply_layer(optimizer, above)
    apply_layer(optimizer, below, [above])
    doubled_twice = next(iter(optimizer.state.values()))["exp_avg"]
    assert torch.equal(doubled_twice, before["state"]["0.weight"]["exp_avg"] * 4)
    assert log[-3:] == ["-above", "+below", "+above"]
    remove_layer(optimizer, below, [above])
    remove_layer(optimizer, above)
    assert same(snapshot(model, optimizer), before)


def test_a_layer_that_cannot_be_packed_leaves_state_as_it_was() -> None:
    model, optimizer = with_gradients(torch.optim.AdamW)
    optimizer.step()
    before = snapshot(model, optimizer)
    with pytest.raises(torch.OutOfMemoryError), FailingAt(5):
        apply_layer(optimizer, Doubling("a", [], per_step=True))
    assert same(snapshot(model, optimizer), before)


def test_checkpoints_pass_through_all_layers() -> None:
    model, optimizer = with_gradients(torch.optim.AdamW)
    optimizer.step()
    before, plain = snapshot(model, optimizer), optimizer.state_dict()
    layers = [Doubling("a", [], per_step=True), Doubling("b", [], per_step=True)]
    pack_loaded(optimizer, layers)
    saved = canonical_state_dict(optimizer, optimizer.state_dict(), layers)
    assert saved["param_groups"] == plain["param_groups"]
    assert same(saved["state"], dict(enumerate(before["state"].values())))
