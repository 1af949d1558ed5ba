"""Transparent accumulation: exact gradients, who runs how often, and what is refused."""

from __future__ import annotations

import copy
import re
import traceback
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, MixtralForCausalLM

from memlab import RefusalError, Workload, fit, predict
from memlab.errors import SessionError
from memlab.runtime import aliases
from memlab.runtime.lazy import LazyTensor
from memlab.techniques.accumulation import micro_outputs
from memlab.techniques.accumulation.probe import Probe
from memlab.techniques.accumulation.split import Call, row_ranges
from tests.techniques.models import (
    Regressor,
    distance,
    gpt2,
    gradients,
    ragged_batch,
    regression_batch,
    workload,
)


class Calls:
    """Rows of every call a module gets from now on, kept where memlab does not put anything back."""

    def __init__(self, module: nn.Module) -> None:
        queue: SimpleQueue[int] = SimpleQueue()
        module.register_forward_pre_hook(lambda _module, args: queue.put(args[0].shape[0]))
        self._queue = queue

    def rows(self) -> list[int]:
        """Those since this was last asked."""
        return [self._queue.get() for _ in range(self._queue.qsize())]


class Packed(nn.GRU):
    """Packs rows of different lengths."""

    def __init__(self) -> None:
        super().__init__(5, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> Any:
        return super().forward(pack_padded_sequence(rows, lengths, batch_first=True))[0]


class TimeFirst(nn.LSTM):
    """Returns rows and positions in one dimension, and takes a matrix of positions first of all in size."""

    def forward(self, inputs: torch.Tensor, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        outputs, _ = super().forward(torch.einsum("ts,sbc->tbc", mask, inputs), (state, state))
        return outputs.flatten(0, 1)


class Transcriber(nn.Linear):
    """Has its targets one after another."""

    def forward(self, sound: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        scores = super().forward(sound).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets, torch.full_like(lengths, sound.size(1)), lengths)


class Jagged(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows).tanh()


class Policy(nn.Linear):
    """Returns an object that knows its size."""

    def forward(self, rows: torch.Tensor) -> Any:
        return torch.distributions.Categorical(logits=super().forward(rows))


def test_an_output_that_knows_its_size() -> None:
    torch.manual_seed(0)
    model, rows, found = Policy(5, 4), torch.randn(6, 5), []
    for plan in ("", "--accumulate 2"):
        model.zero_grad()
        with fit(workload(model), plan):
            actions = model(rows)
            actions.log_prob(torch.arange(6) % 4).sum().backward()
        assert actions.batch_shape == (6,)
        found.append(gradients(model))
    assert distance(found[1], found[0]) < 1e-6


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(n, 5) for n in (3, 1, 4, 2, 2, 5)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda: TimeFirst(5, 4), lambda: (torch.randn(7, 6, 5), torch.zeros(1, 6, 4), torch.rand(7, 7).tril())),
        (
            lambda: Transcriber(5, 4),
            lambda: (torch.randn(6, 9, 5), torch.randint(1, 4, (14,)), torch.tensor([3, 1, 4, 2, 2, 2])),
        ),
        (lambda: Jagged(5, 4), lambda: (jagged(),)),
    ],
    ids=["positions and rows in one dimension", "targets one after another", "nested tensor"],
)
def test_where_the_rows_are_is_found(make: Any, batch: Any) -> None:
    torch.manual_seed(0)
    model, given = make(), batch()

    def train() -> list[torch.Tensor]:
        model.zero_grad()
        output = model(*given)
        (output * given[0].sum(-1, keepdim=True) if output.is_nested else output).sin().sum().backward()
        return gradients(model)

    expected = train()
    with fit(workload(model), "--accumulate 2") as session:
        assert distance(train(), expected) < 1e-6
        assert session.notes == ()


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_gradients_are_those_of_the_whole_batch_with_ragged_targets(parts: int) -> None:
    model, batch = gpt2(), ragged_batch()
    loss = model(**batch).loss
    loss.backward()
    expected = gradients(model)
    with fit(workload(model), f"--accumulate {parts}"):
        split_loss = model(**batch).loss
        split_loss.backward()
    assert distance(gradients(model), expected) < 1e-6
    assert split_loss.item() == pytest.approx(loss.item(), rel=1e-6)


def test_rows_without_targets_do_not_hide_the_rule() -> None:
    model, batch = gpt2(), ragged_batch()
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][:3] = -100  # the others have as many as each other
    loss = model(**batch).loss
    loss.backward()
    expected = gradients(model)
    with fit(workload(model), "--accumulate 2"):
        model(**ragged_batch()).loss.backward()
        model.zero_grad()
        calls = Calls(model.transformer.h[0])
        split_loss = model(**batch).loss
        split_loss.backward()
    assert max(calls.rows()[-2:]) <= (len(batch["labels"]) + 1) // 2
    assert distance(gradients(model), expected) < 1e-6
    assert split_loss.item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_rule_of_the_loss_is_found(reduction: str) -> None:
    model, batch = Regressor(reduction), regression_batch()
    model(*batch).backward()
    expected = gradients(model)
    with fit(workload(model), "--accumulate 3"):
        model(*batch).backward()
    assert distance(gradients(model), expected) < 1e-6


def test_a_loss_the_loop_has_divided_already_is_not_divided_again() -> None:
    model, batch = gpt2(), ragged_batch()
    items = torch.tensor(37)
    model(**batch, num_items_in_batch=items).loss.backward()
    expected = gradients(model)
    with fit(workload(model), "--accumulate 4"):
        model(**batch, num_items_in_batch=items).loss.backward()
    assert distance(gradients(model), expected) < 1e-6


def test_a_rule_that_equal_rows_left_open_is_settled_by_ragged_ones() -> None:
    model, batch = gpt2(), ragged_batch()
    even = {"input_ids": batch["input_ids"], "labels": batch["input_ids"].clone()}
    model(**batch).loss.backward()
    expected = gradients(model)
    with fit(workload(model), "--accumulate 4"):
        model(**even)
        model(**batch).loss.backward()
    assert distance(gradients(model), expected) < 1e-6


class OwnMean(nn.Module):
    """A language model that divides its loss by what a rule counts; untrained, it loses nearly the same on all rows."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule
        self.table, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)

    def hidden(self, words: torch.Tensor) -> torch.Tensor:
        return self.table(words).tanh()

    def forward(self, words: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.hidden(words))
        if self.rule == "shifted":
            logits, labels, weights = logits[:, :-1], labels[:, 1:], weights[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(0), reduction="none")
        counted = {"rows": torch.ones_like(losses), "not zero": labels != 0, "weights": weights}
        which = counted.get(self.rule, labels >= 0).to(losses)
        return (losses * which).sum() / which.sum()


@pytest.mark.parametrize("rule", ["rows", "targets", "shifted", "not zero", "weights"])
@pytest.mark.parametrize("length", [16, 512])
def test_a_few_targets_less_are_counted_as_the_model_counts_them(rule: str, length: int) -> None:
    torch.manual_seed(len(rule))
    model = OwnMean(rule).double()
    calls = Calls(model.table)
    with fit(workload(model), "--accumulate 2"):
        for left_out in (0, 1, 2, 3, 3):  # of models that choose by values the fourth batch is judged again
            words, weights = torch.randint(1, 40, (20, length)), torch.ones(20, length).double()
            labels = words.clone()
            labels[17, length - left_out :] = 0
            labels[18, length - left_out :] = -100
            weights[19, length - left_out :] = 0.5
            loss = model(words, labels, weights)
            loss.backward()
            found, rows = gradients(model), calls.rows()
            model.zero_grad()
            expected = OwnMean(rule).double()
            expected.load_state_dict(model.state_dict())
            expected(words, labels, weights).backward()
            assert distance(found, gradients(expected)) < 1e-12
            assert loss.item() == pytest.approx(expected(words, labels, weights).item(), rel=1e-12)
    assert rows == [10, 10]  # nothing is looked at any more


def test_dropout_in_parts_that_run_again_does_not_hide_the_rule() -> None:
    class Dropping(OwnMean):
        def hidden(self, words: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda: F.dropout(self.table(words), 0.5).tanh(), use_reentrant=False)

    torch.manual_seed(0)
    words = torch.randint(1, 40, (20, 512))
    words[17, -3:] = 0
    call = Call.of((words, words, torch.ones(20, 512)), {})
    probe = Probe(Dropping("not zero"), "Dropping")
    layout = probe.layout(call)
    (weights,) = probe.weights(call, layout, [layout.take(call, 0, 10), layout.take(call, 10, 20)]).values()
    assert weights == [5120 / 10237, 5117 / 10237]


def test_a_loss_of_two_means_stays_whole_once_they_differ() -> None:
    """Of targets and of rows: alike where all rows have as many targets."""

    class TwoMeans(OwnMean):
        def forward(self, words: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return super().forward(words, labels, weights) + self.table(words).square().mean()

    torch.manual_seed(0)
    model = TwoMeans("targets").double()
    words, weights = torch.randint(1, 40, (8, 64)), torch.ones(8, 64).double()
    labels = words.clone()
    with fit(workload(model), "--accumulate 2") as session:
        model(words, labels, weights).backward()
        model.zero_grad()
        labels[5, 60:] = -100
        model(words, labels, weights).backward()
        found = gradients(model)
        notes = " ".join(session.notes)
    model.zero_grad()
    model(words, labels, weights).backward()
    assert distance(found, gradients(model)) < 1e-12
    assert re.search(
        r"a batch is run whole, since the loss of TwoMeans is not a mean or sum over rows or targets, so micro-batches cannot "
        r"give its gradient: for two rows that is [\d.e-]+ off \(allowed 1e-04\)",
        notes,
    )


def test_a_mask_as_large_as_the_batch_by_chance_stays_whole() -> None:
    class Masked(nn.Linear):
        def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs @ mask)

    torch.manual_seed(0)
    model, inputs, mask = Masked(6, 3), torch.randn(6, 6), torch.rand(6, 6)
    model(inputs, mask).square().mean().backward()
    expected = gradients(model)
    with fit(workload(model), "--accumulate 3"):
        model(inputs, mask).square().mean().backward()
    assert distance(gradients(model), expected) < 1e-6


def test_micro_batches_without_any_target_count_nothing() -> None:
    model, batch = gpt2(), ragged_batch()
    batch["labels"][:2] = -100
    model(**batch).loss.backward()
    expected = gradients(model)
    with fit(workload(model), "--accumulate 4"):
        loss = model(**batch).loss
        loss.backward()
    assert loss.isfinite()
    assert distance(gradients(model), expected) < 1e-6


@settings(deadline=None, max_examples=15)
@given(rows=st.integers(2, 9), parts=st.integers(2, 9), scale=st.floats(0.1, 8))
def test_any_split_and_any_scaling_of_the_loss_is_exact(rows: int, parts: int, scale: float) -> None:
    model, batch = Regressor(), regression_batch(rows)
    (model(*batch) * scale).backward()
    expected = gradients(model)
    with fit(workload(model), f"--accumulate {min(rows, parts)}"):
        (model(*batch) * scale).backward()
    assert distance(gradients(model), expected) < 2e-6


@given(rows=st.integers(1, 200), parts=st.integers(1, 40))
def test_ranges_cover_all_rows_in_order_and_evenly(rows: int, parts: int) -> None:
    ranges = row_ranges(rows, min(rows, parts))
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))
    sizes = {stop - start for start, stop in ranges}
    assert max(sizes) - min(sizes) <= 1


def test_the_fused_form_runs_each_micro_batch_once() -> None:
    model, batch = gpt2(), ragged_batch()
    with fit(workload(model), "--accumulate 4"):
        calls = Calls(model.transformer.wte)
        for _ in range(4):  # judged, and looked at again
            model(**batch)
        calls.rows()
        model(**batch).loss.backward()
    assert calls.rows() == [2, 2, 2, 2]


def test_the_replay_form_runs_all_but_the_last_twice() -> None:
    model = Regressor().layers
    inputs, targets = regression_batch(8)
    F.cross_entropy(model(inputs), targets).backward()
    expected = gradients(model)
    with fit(workload(model), "--accumulate 4"):
        calls = Calls(model[0])
        for _ in range(4):  # judged, and looked at again
            model(inputs)
        calls.rows()
        F.cross_entropy(model(inputs), targets).backward()
    assert calls.rows() == [2] * 7
    assert distance(gradients(model), expected) < 1e-6


def test_a_loop_may_train_on_loss_and_logits_together() -> None:
    model, batch = gpt2(), ragged_batch()

    def total(output: Any) -> torch.Tensor:
        return output.loss + 0.1 * output.logits.square().mean()

    total(model(**batch)).backward()
    expected = gradients(model)
    with fit(workload(model), "--accumulate 4"):
        total(model(**batch)).backward()
    assert distance(gradients(model), expected) < 1e-6


def test_a_contrastive_loss_in_the_loop_is_exact() -> None:
    # in fp64: the loss nearly cancels some gradients, and fp32 rounding alone is 2e-6 of what is left
    model = Regressor().layers.double()
    inputs = regression_batch(8)[0].double()

    def loss() -> torch.Tensor:
        embedded = model(inputs)
        return F.cross_entropy(embedded @ embedded.t(), torch.arange(8))

    loss().backward()
    expected = gradients(model)
    with fit(workload(model), "--accumulate 4"):
        loss().backward()
    assert distance(gradients(model), expected) < 1e-12


def test_dropout_is_that_of_a_loop_written_by_hand() -> None:
    model, batch = gpt2(dropout=0.3), ragged_batch()
    counts = (batch["labels"][:, 1:] != -100).view(4, 2, -1).sum((1, 2))
    torch.manual_seed(5)
    for part in range(4):
        micro = {key: value[2 * part : 2 * part + 2] for key, value in batch.items()}
        (model(**micro).loss * counts[part] / counts.sum()).backward()
    expected = gradients(model)
    with fit(workload(model), "--accumulate 4"):
        model(**batch)  # probes, which must not use up random numbers
        torch.manual_seed(5)
        model(**batch).loss.backward()
    assert distance(gradients(model), expected) < 1e-6


def test_replay_repeats_dropout() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    inputs, targets = regression_batch(8)
    with fit(workload(model), "--accumulate 4"):
        model(inputs)
        torch.manual_seed(5)
        output = model(inputs)
        F.cross_entropy(output, targets).backward()
        found = gradients(model)
        after = torch.rand(3)
    torch.manual_seed(5)
    pieces = [model(inputs[start : start + 2]) for start in range(0, 8, 2)]
    F.cross_entropy(torch.cat(pieces), targets).backward()
    assert torch.equal(output, torch.cat(pieces))
    assert distance(found, gradients(model)) < 1e-6
    assert torch.equal(after, torch.rand(3))


def test_uneven_micro_batches_wait_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that are large in a micro-batch of three rows and small in one of two are computed on demand in both."""
    monkeypatch.setattr(micro_outputs, "LAZY_FROM_BYTES", 2900)

    class Both(nn.Linear):
        def forward(self, rows: torch.Tensor) -> Any:
            logits = super().forward(rows)
            return logits, logits.square().mean()

    torch.manual_seed(0)
    model, rows = Both(4, 100), torch.randn(8, 4)
    model(rows)[1].backward()
    whole = gradients(model)
    with fit(Workload(model, torch.optim.SGD(model.parameters())), "--accumulate 3"):
        for _ in range(2):
            model(rows)[1].backward()
            assert distance(gradients(model), whole) < 1e-6
        logits, _ = model(rows)
        assert isinstance(logits, LazyTensor)
        assert torch.allclose(logits + 0, nn.Linear.forward(model, rows), atol=1e-6)


def test_gradients_are_handed_over_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[int] = []
    take = aliases.Aliases.take_gradients

    def noted(aliases: aliases.Aliases) -> list[torch.Tensor | None]:
        gathered = take(aliases)
        handed.extend(g.data_ptr() for g in gathered if g is not None)
        return gathered

    model, batch = gpt2(), ragged_batch()
    with fit(workload(model), "--accumulate 4"):
        model(**batch)  # is judged
        monkeypatch.setattr(aliases.Aliases, "take_gradients", noted)
        model(**batch).loss.backward()
    assert [p.grad.data_ptr() for p in model.parameters()] == handed


def test_hooks_on_parameters_fire_once_on_the_whole_gradient() -> None:
    model, batch = gpt2(), ragged_batch()
    seen: list[torch.Tensor] = []
    model.lm_head.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
    model(**batch).loss.backward()
    expected = gradients(model)
    with fit(workload(model), "--accumulate 4"):
        model(**batch).loss.backward()
    assert len(seen) == 2
    assert distance(gradients(model), expected) < 1e-6


def test_gradients_of_the_loop_are_added_to() -> None:
    model, batch = gpt2(), ragged_batch()
    with fit(workload(model), "--accumulate 4"):
        model(**batch).loss.backward()
        once = [p.grad.clone() for p in model.parameters()]
        model(**batch).loss.backward()
    assert distance(gradients(model), [2 * gradient for gradient in once]) < 1e-6


def test_inputs_get_their_gradient() -> None:
    model, batch = gpt2(), ragged_batch()
    embedded = model.transformer.wte(batch["input_ids"]).detach().requires_grad_()
    model(inputs_embeds=embedded, labels=batch["labels"]).loss.backward()
    expected, embedded.grad = embedded.grad, None
    with fit(workload(model), "--accumulate 4"):
        model(inputs_embeds=embedded, labels=batch["labels"]).loss.backward()
    assert distance([embedded.grad], [expected]) < 1e-6


def test_fp16_of_the_loop_does_not_lose_small_gradients() -> None:
    model, (inputs, targets) = Regressor(), regression_batch(8)
    tiny = 1e-5
    (model(inputs, targets) * tiny).backward()
    expected = gradients(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    load = workload(model)
    with fit(load, "--accumulate 4"):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(inputs, targets) * tiny
        scaler.scale(loss).backward()
        scaler.unscale_(load.optimizers[0])
    assert distance(gradients(model), expected) < 5e-3


class TestLargeOutputs:
    """Logits that the loop gets back and usually never reads."""

    @pytest.fixture(autouse=True)
    def _every_output_is_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(micro_outputs, "LAZY_FROM_BYTES", 1)

    def test_they_are_computed_when_looked_at(self) -> None:
        model, batch = gpt2(dropout=0.2), ragged_batch()
        calls = Calls(model.transformer.wte)
        with fit(workload(model), "--accumulate 4"):
            output = model(**batch)
            assert isinstance(output.logits, LazyTensor)
            assert output.logits.shape == (8, 32, 4096)
            calls.rows()
            output.loss.backward()
            assert calls.rows() == []
            looked_at = output.logits.argmax(-1)
            assert looked_at.shape == (8, 32)
            assert calls.rows() == [2, 2, 2, 2]
            assert not isinstance(model(**batch).logits, LazyTensor)  # the loop reads them: kept from now on

    def test_their_values_are_those_of_the_forward(self) -> None:
        model, batch = gpt2(), ragged_batch()
        expected = model(**batch).logits.detach()
        with fit(workload(model), "--accumulate 4"):
            lazy = model(**batch).logits
            assert torch.allclose(lazy, expected, atol=1e-5)
            assert torch.equal(torch.stack([lazy[0], lazy[1]]), lazy[:2])

    def test_a_loss_made_of_them_is_exact(self) -> None:
        model, batch = gpt2(), ragged_batch()
        model(**batch).logits.square().mean().backward()
        expected = gradients(model)
        with fit(workload(model), "--accumulate 4"):
            model(**batch).logits.square().mean().backward()
        assert distance(gradients(model), expected) < 1e-6

    def test_a_loop_that_may_read_them_after_the_step_gets_them(self) -> None:
        model, batch = gpt2(), ragged_batch()
        expected = model(**batch).logits.detach()
        load, calls = workload(model), Calls(model.transformer.wte)
        with fit(load, "--accumulate 4"):
            output = model(**batch)
            output.loss.backward()
            calls.rows()
            load.optimizers[0].step()
            assert torch.allclose(output.logits, expected, atol=1e-5)
            assert calls.rows() == [2, 2, 2, 2]
            assert not isinstance(model(**batch).logits, LazyTensor)

    def test_a_loop_that_reads_the_loss_alone_pays_for_nothing_else(self) -> None:
        model, batch = gpt2(), ragged_batch()
        load = workload(model)
        with fit(load, "--accumulate 4"):
            calls = Calls(model.transformer.wte)
            for _ in range(2):
                output = model(**batch)
                loss = output.loss
                loss.backward()
                assert calls.rows()
                load.optimizers[0].step()
                assert calls.rows() == []

    def test_reading_them_from_elsewhere_after_the_step_says_what_to_do(self) -> None:
        model, batch = gpt2(), ragged_batch()
        load = workload(model)
        with fit(load, "--accumulate 4"):
            output = model(**batch)
            output.loss.backward()
            load.optimizers[0].step()
            with pytest.raises(SessionError) as caught:  # as a later cell would
                eval("output" + ".logits.mean()")
        assert str(caught.value) == (
            "an output of a split batch was read after optimizer.step(), when its parameters were gone: "
            "read it before the step (from the next batch on memlab keeps it)"
        )


class TestRefusals:
    """What cannot be split, each in one line that names the nearest thing that works."""

    @pytest.mark.parametrize("kind", ["contrastive", "root"])
    def test_a_loss_that_does_not_add_up(self, kind: str) -> None:
        model, batch = Regressor(kind), regression_batch()
        with fit(workload(model), "--accumulate 3"), pytest.raises(RefusalError) as caught:
            model(*batch)
        assert re.sub(r"\d[\d.]*", "N", str(caught.value)) == (
            "accumulation: the loss of Regressor is not a mean or sum over rows or targets, so micro-batches cannot "
            "give its gradient: for N rows together it is N, for them in two parts N and N; let the loop compute the loss from "
            "the outputs (any loss works then), or use --checkpoint"
        )

    def test_a_bent_loss_is_seen_where_the_first_rows_are_alike(self) -> None:
        accepted = []
        for seed in range(60):
            model, batch = Regressor("root"), regression_batch()
            torch.manual_seed(seed)
            for parameter in model.parameters():
                nn.init.uniform_(parameter, -0.3, 0.3)
            with fit(workload(model), "--accumulate 3"):
                try:
                    model(*batch)
                except RefusalError:
                    continue
                accepted.append(seed)
        assert accepted == []

    def test_batch_norm(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RefusalError) as caught, fit(workload(model), "--accumulate 2"):
            model(torch.randn(4, 4))
        assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
        predicted = Workload(
            model, torch.optim.SGD(model.parameters(), 0.1), batch=torch.randn(4, 4), loss_fn=torch.sum
        )
        with pytest.raises(RefusalError, match=r"accumulation: Sequential has BatchNorm \(1\)"):
            predict(predicted, "--accumulate 2")
        assert str(caught.value) == (
            "accumulation: Sequential has BatchNorm (1), whose statistics depend on the whole batch; "
            "add --batchnorm micro for statistics of each micro-batch, as in accumulation written by hand, "
            "or use --checkpoint or --offload activations, which keep the batch whole"
        )

    def test_batch_norm_that_the_loop_freezes_and_thaws(self) -> None:
        """Frozen ones are split as any layer; a batch that comes after the loop has thawed them is run whole."""

        def outputs(plan: str) -> tuple[list[torch.Tensor], list[str]]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            found, inputs = [], torch.randn(4, 8, 4)
            with fit(workload(model), plan) as session:
                for step in range(4):
                    model.train()
                    model[1].train(step > 1)
                    loss = model(inputs[step]).square().mean()
                    loss.backward()
                    found.append(loss.detach())
                notes = [note for each in session.techniques for note in each.notes]
            return [*found, *(each.grad for each in model.parameters() if each.grad is not None)], notes

        (found, notes), (plain, _) = outputs("--accumulate 2"), outputs("")
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
        assert notes == [
            "a batch is run whole, since Sequential has BatchNorm (1), whose statistics depend on the whole batch"
        ]

    def test_rows_that_depend_on_each_other(self) -> None:
        class Centred(nn.Linear):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                outputs = super().forward(inputs)
                return outputs - outputs.mean(dim=(0, 1))

        model = Centred(5, 3)
        with fit(workload(model), "--accumulate 2"), pytest.raises(RefusalError) as caught:
            model(torch.randn(6, 4, 5))
        assert re.fullmatch(
            "accumulation: rows of a batch depend on each other in Centred: run apart they give another result than together "
            r"\(output is 0\.\d+ of its size off, allowed 1e-04\); use --checkpoint or --offload activations, which keep the "
            "batch whole",
            str(caught.value),
        )

    def test_outputs_as_long_as_the_longest_row(self) -> None:
        class Tagger(Packed):
            def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
                return self.head(pad_packed_sequence(super().forward(rows, lengths), batch_first=True)[0])

        lengths = torch.tensor([7, 6, 3, 2])
        with fit(workload(model := Tagger()), "--accumulate 2"), pytest.raises(RefusalError) as caught:
            model(torch.randn(4, 7, 5), lengths)
        assert str(caught.value) == (
            "accumulation: output of Tagger is as long in dimension 1 as the longest row it is given, and not zero beyond "
            "others; give it one length (`total_length=` of pad_packed_sequence), or use --checkpoint or --offload "
            "activations, which keep the batch whole"
        )

    def test_nodes_of_one_graph(self) -> None:
        class Graph(nn.Linear):
            def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
                return super().forward(edges @ nodes)

        with fit(workload(model := Graph(5, 3)), "--accumulate 2"), pytest.raises(RefusalError) as caught:
            model(torch.randn(6, 5), torch.rand(6, 6))
        assert "(one of its arguments is [6, 6], rows by rows, as of the nodes of one graph); use --checkpoint" in str(
            caught.value
        )

    def test_the_loss_of_a_router_of_experts(self) -> None:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = MixtralConfig(
            vocab_size=64,
            num_hidden_layers=2,
            num_local_experts=4,
            output_router_logits=True,
            router_aux_loss_coef=0.1,
            **sizes,
        )
        torch.manual_seed(0)
        ids = torch.randint(0, 64, (8, 16))
        with (
            fit(workload(model := MixtralForCausalLM(config)), "--accumulate 2"),
            pytest.raises(RefusalError) as caught,
        ):
            model(input_ids=ids, labels=ids)
        assert str(caught.value).startswith(
            "accumulation: the loss of MixtralForCausalLM is not a mean or sum over rows or targets, so micro-batches cannot give its "
            "gradient: for 2 rows together it is "
        )
        assert str(caught.value).endswith(
            "; let the loop compute the loss from the outputs (any loss works then), or use --checkpoint"
        )

    def test_rows_that_are_partly_in_numpy(self) -> None:
        class Weighted(nn.Linear):
            def forward(self, rows: torch.Tensor, weights: np.ndarray) -> torch.Tensor:
                return super().forward(rows) * torch.from_numpy(weights)[:, None]

        with fit(workload(model := Weighted(5, 3)), "--accumulate 2"), pytest.raises(RefusalError) as caught:
            model(torch.randn(6, 5), np.ones(6, dtype=np.float32))
        said = "(one of its arguments is a NumPy array of 6 rows, which is not split: hand over a tensor); use --checkpoint"
        assert said in str(caught.value)

    def test_a_batch_too_small_for_a_plan_on_trial(self) -> None:
        model = Regressor()
        with fit(workload(model)) as session:
            session.switch("--accumulate 4", on_trial=True)
            line = "refused --accumulate 4: .*needs at least 4 rows in a batch of Regressor, this one has 3; use --accumulate 3 or"
            with pytest.warns(RuntimeWarning, match=line):
                model(*regression_batch(3))

    @pytest.mark.parametrize("before", [0, 8])
    def test_a_smaller_batch_is_split_as_far_as_it_goes(self, before: int) -> None:
        model = Regressor()
        inputs, targets = regression_batch(3)
        model(inputs, targets).backward()
        expected = gradients(model)
        with fit(workload(model), "--accumulate 4") as session:
            for rows in (before,) if before else ():
                model(*regression_batch(rows))
            model(inputs, targets).backward()
            assert session.notes == ("a batch of fewer rows than micro-batches (3 of 4) is split as far as it goes",)
        assert distance(gradients(model), expected) < 1e-6

    def test_a_call_without_tensors(self) -> None:
        class Fixed(nn.Linear):
            def forward(self) -> torch.Tensor:
                return super().forward(torch.ones(3, 4)).sum()

        with fit(workload(Fixed(4, 1)), "--accumulate 2") as session, pytest.raises(RefusalError) as caught:
            session.workload.model()
        assert str(caught.value) == (
            "accumulation: the call of Fixed has no tensor argument to split; pass the batch as tensors"
        )

    def test_hooks_of_the_loop_on_saved_tensors(self) -> None:
        model, (inputs, targets) = Regressor().layers, regression_batch()
        F.cross_entropy(model(inputs), targets).backward()
        expected = gradients(model)
        with fit(workload(model), "--accumulate 3"):
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
                loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
        assert distance(gradients(model), expected) < 1e-6

    def test_a_second_backward_through_outputs(self) -> None:
        found = []
        for flags in ("", "--accumulate 3"):
            model, (inputs, targets) = Regressor().layers, regression_batch()
            with fit(workload(model), flags):
                output = model(inputs)
                F.cross_entropy(output, targets).backward(retain_graph=True)
                first = [p.grad.clone() for p in model.parameters()]
                penalty = output.square().mean()
                penalty.backward()
                with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                    output.sum().backward()
            found.append(first + gradients(model))
        assert distance(found[1], found[0]) < 1e-6

    @pytest.mark.parametrize("returns_loss", [True, False])
    def test_gradients_of_gradients(self, returns_loss: bool) -> None:
        found = []
        for flags in ("", "--accumulate 3"):
            model, (inputs, targets) = Regressor(), regression_batch()
            before = nn.Linear(inputs.shape[-1], inputs.shape[-1])
            with fit(workload(model if returns_loss else model.layers), flags):
                rows = before(inputs)  # whose weights the penalty trains as well
                loss = model(rows, targets) if returns_loss else F.cross_entropy(model.layers(rows), targets)
                slopes = torch.autograd.grad(loss, [rows, *model.parameters()], create_graph=True)
                (loss + sum(slope.square().sum() for slope in slopes)).backward()
            found.append([*gradients(model), *gradients(before), *(slope.detach() for slope in slopes)])
        assert distance(found[1], found[0]) < 1e-5

    def test_hooks_on_gradients_of_gradients_run_once(self) -> None:
        found = []
        for flags in ("", "--accumulate 3"):
            model, (inputs, targets) = Regressor(), regression_batch()
            inputs.requires_grad_()
            calls: list[int] = []
            for number, tensor in enumerate((inputs, *model.parameters())):
                tensor.register_hook(lambda gradient, number=number, calls=calls: calls.append(number) or gradient / 2)
            with fit(workload(model), flags):
                loss = model(inputs, targets)
                slopes = torch.autograd.grad(loss, [inputs, *model.parameters()], create_graph=True)
                (loss + sum(slope.square().sum() for slope in slopes)).backward()
            assert inputs.grad is not None
            found.append([*gradients(model), inputs.grad, torch.tensor(sorted(calls), dtype=torch.float32)])
        assert distance(found[1], found[0]) < 1e-5

    def test_gradients_of_gradients_by_tensors_that_stand_for_parameters(self) -> None:
        found = []
        for flags in ("", "--accumulate 3"):
            model, (inputs, targets) = Regressor(), regression_batch()
            with fit(workload(model), flags):
                fast = {name: value * 2 for name, value in model.named_parameters()}
                loss = torch.func.functional_call(model, fast, (inputs, targets))
                slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                sum(slope.square().sum() for slope in slopes).backward()
            found.append(gradients(model))
        assert distance(found[1], found[0]) < 1e-5

    def test_gradients_of_gradients_with_the_dropout_of_the_call(self) -> None:
        model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 1))
        inputs = torch.randn(6, 4, requires_grad=True)
        with fit(workload(model), "--accumulate 3"):
            output = model(inputs)
            state = torch.get_rng_state()
            (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
            (same,) = torch.autograd.grad(output.sum(), inputs)
        assert torch.equal(slope, same)
        assert torch.equal(torch.get_rng_state(), state)

    def test_a_parameter_reached_past_its_module(self) -> None:
        class Hidden(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 1)
                self.weights = [self.linear.weight]

            def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": F.linear(inputs, self.weights[0]).square().mean()}

        model = Hidden()
        with fit(workload(model), "--accumulate 2"), pytest.raises(RefusalError) as caught:
            model(torch.randn(4, 4))
        assert str(caught.value) == (
            "accumulation: Hidden reaches a parameter through another reference than its modules' attributes; "
            "use --checkpoint or --offload activations, which keep the batch whole"
        )
        assert model.linear.weight.grad is None


def test_parameters_are_back_in_place_when_the_model_raises() -> None:
    class Failing(Regressor):
        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled() and self.fails:
                raise KeyboardInterrupt
            return super().forward(inputs, targets)

        fails = False

    model, batch = Failing(), regression_batch()
    before = [id(p) for p in model.parameters()]
    with fit(Workload(model, torch.optim.SGD(model.parameters(), 0.1)), "--accumulate 3"):
        model(*batch)
        model.fails = True
        with pytest.raises(KeyboardInterrupt):
            model(*batch)
        assert [id(p) for p in model.parameters()] == before
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("good_calls", [0, 1])
def test_what_the_model_raises_stands_alone(good_calls: int) -> None:
    """Not with what was found out about its batch before: that would be shown as a first error."""

    class Failing(Regressor):
        fails = False

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            try:
                return super().forward(inputs if not self.fails else inputs[:, :1], targets)
            except RuntimeError as error:
                raise ValueError("no such data") from error

    model, batch = Failing(), regression_batch()
    with fit(Workload(model, torch.optim.SGD(model.parameters(), 0.1)), "--accumulate 3"):
        for _ in range(good_calls):
            model(*batch)
        model.fails = True
        with pytest.raises(ValueError, match="no such data") as caught:
            model(*batch)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 2  # the model's own two
    assert "RefusalError" not in shown


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_a_forward_counts_before_it_raises_stays_counted(error: type[BaseException]) -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                raise error
            return super().forward(inputs)

    model = Counting(4, 2)
    with fit(workload(model), "--accumulate 2"):
        for call in range(1, 4):
            with pytest.raises(error) if call == 2 else nullcontext():
                model(torch.ones(4, 4))
            assert model.calls == call


def test_casts_of_recomputed_blocks_do_not_add_up() -> None:
    """Casts of weights live until the outermost autocast context is left: there must be none around the backward pass."""
    from memlab.runtime.autocast import without_autocast

    with without_autocast():
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()
    with torch.autocast("cpu", dtype=torch.bfloat16), without_autocast():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("model", "draws"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), True),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), True),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)), False),
    ],
    ids=["dropout", "dropout in attention", "none"],
)
def test_a_model_that_draws_random_numbers_is_said_once(model: Any, draws: bool) -> None:
    model = model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), "--accumulate 2") as session:
        for _ in range(2):
            model(torch.randn(4, 3, 8)).sum().backward()
            optimizer.step()
        said = [note for note in session.notes if "draws random numbers" in note]
    assert said == (
        [
            f"{type(model).__name__} draws random numbers: each micro-batch draws its own, as in accumulation written by hand, "
            "so losses differ from those of whole batches as they do from seed to seed"
        ]
        if draws
        else []
    )


class _OfSparseRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 24).view(6, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(inputs, self.weight).tanh()


def test_a_sparse_batch_is_refused() -> None:
    model = _OfSparseRows()
    with fit(Workload(model, torch.optim.SGD(model.parameters())), "--accumulate 2"):
        with pytest.raises(
            RefusalError, match="the batch of _OfSparseRows is a sparse or nested tensor, which is not split"
        ):
            model(torch.eye(6).to_sparse())


def test_a_loss_that_some_rows_do_not_have_is_refused() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor | None:
            return self.layer(inputs).mean() if len(inputs) > 2 or inputs[0, 0] > 0 else None

    inputs = torch.randn(8, 4)
    inputs[:, 0] = torch.tensor([1.0, -1.0] * 4)
    model = Picky()
    with fit(Workload(model, torch.optim.SGD(model.parameters())), "--accumulate 4"):
        with pytest.raises(
            RefusalError, match="Picky returns a number for a whole batch and none for some of its rows"
        ):
            model(inputs)
