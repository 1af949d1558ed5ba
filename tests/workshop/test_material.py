"""The work of the course: real text, and a model that learns from it."""

from __future__ import annotations

import pytest
import torch

from memlab.units import GIB
from memlab.workshop import here, material
from memlab.workshop.material import library_tokens


def test_work_here_is_small_enough_for_this_machine_and_learns() -> None:
    work = here()
    model = work.gpt2()
    batches = work.batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for _ in range(6):
        batch = next(batches)
        assert batch.shape == (work.rows, work.tokens)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert str(work.rows) in str(work)


def test_models_are_the_same_each_time_and_take_settings() -> None:
    work = here()
    one, other = work.gpt2(), work.gpt2()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert work.gpt2(n_layer=1, attention="eager").config.n_layer == 1


def test_text_is_read_once_and_every_token_is_known() -> None:
    ids = library_tokens(4000)
    assert library_tokens(4000) is ids
    assert len(ids) > 100_000
    assert 0 <= int(ids.min()) <= int(ids.max()) < 4000
    assert next(here().batches(rows=2)).shape[0] == 2


def test_one_thread_or_little_memory_gets_a_smaller_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(material, "host_bytes", lambda: 16 * GIB)
    assert torch.get_num_threads() == 1
    alone = here()
    torch.set_num_threads(2)
    try:
        assert here().width * here().layers > alone.width * alone.layers
        # Binder grants two cores at times, and never more than 2 GiB
        monkeypatch.setattr(material, "host_bytes", lambda: 2 * GIB)
        assert here() == alone
    finally:
        torch.set_num_threads(1)
