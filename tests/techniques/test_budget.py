"""Checkpointing by a budget: which blocks are recomputed, and that the rest fits."""

from __future__ import annotations

import re
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from memlab import RefusalError, Workload, fit, measure, predict
from memlab.measuring.ledger import Ledger
from memlab.session.snapshot import Snapshot
from memlab.units import KIB, MIB
from tests.helpers.snapshots import changed_between
from tests.techniques.models import distance, gpt2, gradients, ragged_batch, workload

_WORDS = re.compile(r"(\d+) of (\d+) blocks recomputed: (\S+ \S+) kept of (\S+ \S+), budget (\S+ \S+)")


def blocks_recomputed(session: Any) -> tuple[int, int]:
    (found,) = filter(None, map(_WORDS.match, session.notes))
    return int(found[1]), int(found[2])


def held_after_forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that a forward leaves behind for its backward pass."""
    ledger = Ledger()
    ledger.begin([])
    with ledger:
        loss = model(**batch).loss
    held_bytes = ledger.live_bytes
    del loss
    ledger.close()
    return held_bytes


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("budget", ["400KiB", "1200KiB", "64MiB"])
def test_gradients_are_the_same_with_dropout_under_the_same_random_state(budget: str, dropout: float) -> None:
    model, batch = gpt2(dropout=dropout, layers=3), ragged_batch()
    torch.manual_seed(3)
    model(**batch).loss.backward()
    expected, after = gradients(model), torch.rand(2)
    with fit(workload(model), f"--checkpoint budget:{budget}"):
        for _ in range(2):  # the first forward only looks
            torch.manual_seed(3)
            model(**batch).loss.backward()
            assert distance(gradients(model), expected) < 1e-6
    assert torch.equal(torch.rand(2), after)


def test_what_blocks_keep_is_what_it_says() -> None:
    model, batch = gpt2(layers=6, width=128, vocabulary=64), ragged_batch(vocabulary=64)
    with fit(workload(model), "--checkpoint"):
        least = held_after_forward(model, batch)
    for size in (2, 5, 9, 16):
        with fit(workload(model), f"--checkpoint budget:{size}MiB") as session:
            assert held_after_forward(model, batch) == least  # every block, the first time
            held = held_after_forward(model, batch)
            recomputed, blocks = blocks_recomputed(session)
        inputs = 6 * 8 * 32 * 128 * 4
        kept = held - least + inputs
        assert kept <= size * MIB + 1024  # masks and positions come in as well
        one = (kept - inputs) / (blocks - recomputed) if recomputed < blocks else 3 * MIB
        assert recomputed == 0 or kept + one > size * MIB  # one block fewer would not do


class Stage(nn.Module):
    def __init__(self, width: int, repeats: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(repeats))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


class Noting(nn.Module):
    """Says when it is run, to a queue: hooks and lists are as if a block had not been recomputed."""

    def __init__(self, inner: nn.Module, said: SimpleQueue[int], number: int = 0) -> None:
        super().__init__()
        self.inner, self._said, self._number = inner, said, number

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self._said.put(self._number)
        return self.inner(hidden)


def _drained(said: SimpleQueue[int]) -> list[int]:
    return [said.get() for _ in range(said.qsize())]


class Uneven(nn.Module):
    """Blocks of one class, of which each keeps another number of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(64, repeats) for repeats in (1, 4, 2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            hidden = stage(hidden)
        return hidden.square().mean()


def test_of_uneven_blocks_those_are_recomputed_that_suffice_at_the_least_cost() -> None:
    torch.manual_seed(0)
    model = Uneven()
    inputs = torch.randn(256, 64)  # each result takes 64 KiB; of a stage all but the last one are its own
    passes: SimpleQueue[int] = SimpleQueue()
    for number, stage in enumerate(model.stages):
        stage.layers[0] = Noting(stage.layers[0], passes, number)

    def recomputed(budget_bytes: int) -> list[int]:
        with fit(workload(model), f"--checkpoint budget:{budget_bytes}B"):
            model(inputs).backward()
            _drained(passes)
            model(inputs).backward()
        noted = _drained(passes)
        return sorted(number for number in range(3) if noted.count(number) == 2)

    # three inputs of 64 KiB; 0, 3 and 1 results of 64 KiB
    assert recomputed(7 * 64 * KIB) == []
    assert recomputed(6 * 64 * KIB) == [2]
    assert recomputed(5 * 64 * KIB) == [1]
    assert recomputed(3 * 64 * KIB) == [1, 2]


def test_a_budget_that_recomputing_everything_exceeds_is_refused() -> None:
    model, batch = gpt2(layers=3), ragged_batch()
    load = workload(model)
    before = Snapshot(load)
    with fit(load, "--checkpoint budget:100KiB"), pytest.raises(RefusalError) as caught:
        model(**batch)
    assert changed_between(before, Snapshot(load)) == []
    assert str(caught.value) == (
        "checkpointing: with all 3 blocks of GPT2LMHeadModel recomputed they still keep their inputs, 192.2 KiB, and the "
        "budget is 100.0 KiB; use --checkpoint budget:1MiB or more, or add --accumulate N, which divides them"
    )


def test_other_shapes_are_measured_anew_and_smaller_ones_use_the_choice_of_larger_ones() -> None:
    model = gpt2(layers=4)
    calls: SimpleQueue[int] = SimpleQueue()
    first = model.transformer.h[0]
    first.ln_1 = Noting(first.ln_1, calls)
    with fit(workload(model), "--checkpoint budget:2MiB") as session:

        def forwards(rows: int) -> int:
            _drained(calls)
            model(**ragged_batch(rows=rows))
            return calls.qsize()

        assert forwards(8) == 2
        chosen = blocks_recomputed(session)
        assert forwards(8) == 1
        assert forwards(6) == 1  # keeps less
        assert blocks_recomputed(session) == chosen
        assert forwards(2) == 2
        assert blocks_recomputed(session) == (0, 4)
        assert forwards(2) == 1
        assert forwards(9) == 2


def test_a_later_batch_that_exceeds_the_budget_is_recomputed_wholly_and_said() -> None:
    model = gpt2(layers=2)
    with fit(workload(model), "--checkpoint budget:100KiB") as session:
        model(**ragged_batch(rows=4)).loss.backward()
        model(**ragged_batch(rows=8)).loss.backward()
        assert session.notes[0].endswith("budget 100.0 KiB, which a batch of this shape exceeds")
        assert blocks_recomputed(session) == (2, 2)


def test_eval_mode_and_no_grad_measure_nothing() -> None:
    model, batch = gpt2(), ragged_batch()
    with fit(workload(model), "--checkpoint budget:1MiB") as session:
        with torch.no_grad():
            model(**batch)
        model.eval()(**batch)
        assert session.notes == ()


def test_encoder_and_decoder_share_a_budget() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 3, "vocab_size": 64}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)).train()
    ids = torch.randint(1, 64, (8, 32), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    expected = gradients(model)
    with fit(workload(model), "--checkpoint budget:2MiB") as session:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            assert distance(gradients(model), expected) < 1e-6
        recomputed, blocks = blocks_recomputed(session)
    assert blocks == 6
    assert 0 < recomputed < 6


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", ["", "--accumulate 2", "--bf16", "--chunk-loss", "--accumulate 3 --adam8bit"])
def test_predictions_are_exact_on_the_ledger(flags: str) -> None:
    load = workload(gpt2(layers=4), **ragged_batch())
    plan = f"--checkpoint budget:1MiB {flags}"
    predicted, found = predict(load, plan), measure(load, plan, steps=1)
    assert abs(predicted.peak_allocated_bytes / found.peak_allocated_bytes - 1) < 0.001
    assert [note for note in found.notes if "blocks" in note] == [note for note in predicted.notes if "blocks" in note]


def test_a_budget_for_micro_batches_may_be_too_small_for_the_batch() -> None:
    load = workload(gpt2(layers=4), **ragged_batch())
    with pytest.raises(RefusalError, match="recomputed they still keep their inputs"):
        predict(load, "--checkpoint budget:200KiB")
    plan = "--checkpoint budget:200KiB --accumulate 4"
    predicted, found = predict(load, plan), measure(load, plan, steps=1)
    assert abs(predicted.peak_allocated_bytes / found.peak_allocated_bytes - 1) < 0.001


@pytest.mark.parametrize("flags", ["", "--accumulate 2 "])
def test_under_a_rescue_the_same_numbers_come_out(flags: str) -> None:
    losses = []
    for rescue in (False, True):
        model, batch = gpt2(layers=3, dropout=0.1), ragged_batch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(5)
        with fit(Workload(model, optimizer), f"{flags}--checkpoint budget:1MiB", rescue=rescue) as session:
            for _ in range(3):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert 0 < blocks_recomputed(session)[0] <= 3
    assert losses[:3] == losses[3:]
