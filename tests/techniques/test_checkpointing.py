"""Checkpointing of repeated blocks on a live model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from memlab import RefusalError, Workload, fit, measure
from memlab.records import Category
from memlab.runtime.modules import repeated_blocks
from tests.helpers.chatty import changed, chatty
from tests.techniques.models import Masked, distance, gpt2, gradients, ragged_batch, workload

PLANS = ["--checkpoint", "--checkpoint every:2", "--checkpoint selective"]


@pytest.mark.parametrize("flags", PLANS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_the_same_with_dropout_under_the_same_random_state(flags: str, dropout: float) -> None:
    model, batch = gpt2(dropout=dropout, layers=3), ragged_batch()
    torch.manual_seed(3)
    model(**batch).loss.backward()
    expected, after = gradients(model), torch.rand(2)
    with fit(workload(model), flags):
        torch.manual_seed(3)
        model(**batch).loss.backward()
    assert distance(gradients(model), expected) < 1e-6
    assert torch.equal(torch.rand(2), after)


@pytest.mark.parametrize("flags", ["--checkpoint", "--accumulate 2"])
def test_rows_packed_by_their_positions_stay_apart(flags: str) -> None:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
        )
    )
    ids = torch.randint(0, 64, (4, 24))
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(4, -1)
    # without a cache the model takes each restart of positions for another text
    losses = []
    for plan in ("", flags):
        model.zero_grad()
        with fit(workload(model), plan):
            loss = model(input_ids=ids, labels=ids, position_ids=positions).loss
            loss.backward()
        losses.append((loss.detach(), gradients(model)))
    assert torch.allclose(losses[0][0], losses[1][0], rtol=1e-6)
    assert distance(losses[1][1], losses[0][1]) < 1e-6


def test_activations_fall_by_the_share_of_checkpointed_blocks() -> None:
    model = gpt2(layers=6, vocabulary=64, width=128)
    load = workload(model, **ragged_batch(vocabulary=64))
    as_written, half, full = (
        measure(load, flags, steps=1).breakdown[Category.ACTIVATIONS]
        for flags in ("", "--checkpoint every:2", "--checkpoint")
    )
    assert full < half < as_written
    assert full < 0.4 * as_written


def test_selective_keeps_the_results_of_matrix_products() -> None:
    model, batch = gpt2(layers=2), ragged_batch()

    def products(flags: str) -> int:
        from torch.utils.flop_counter import FlopCounterMode

        with fit(workload(model), flags), FlopCounterMode(display=False) as counter:
            model(**batch).loss.backward()
        return counter.get_total_flops()

    as_written, selective, full = products(""), products("--checkpoint selective"), products("--checkpoint")
    assert selective == as_written
    assert full > 1.05 * as_written


def test_eval_mode_and_no_grad_are_not_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    import memlab.techniques.checkpointing.rerun as module

    calls: list[int] = []
    original = module.checkpoint
    monkeypatch.setattr(module, "checkpoint", lambda *a, **k: calls.append(1) or original(*a, **k))
    model, batch = gpt2(), ragged_batch()
    with fit(workload(model), "--checkpoint"):
        with torch.no_grad():
            model(**batch)
        model.eval()(**batch)
        assert calls == []
        model.train()(**batch)
    assert len(calls) == 2


def test_four_toggles_leave_no_trace() -> None:
    model, batch = gpt2(), ragged_batch()
    before = {name: dict(module.__dict__["_forward_hooks"]) for name, module in model.named_modules()}
    with fit(workload(model)) as session:
        for flags in PLANS + PLANS:
            session.switch(flags)
            model(**batch)
            session.switch("", now=True)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert {name: dict(module.__dict__["_forward_hooks"]) for name, module in model.named_modules()} == before


def test_blocks_are_found_in_encoder_and_decoder() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 3, "vocab_size": 64}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    assert len(repeated_blocks(model)) == 6


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])
def test_a_model_of_single_layers_has_nothing_to_recompute(model: nn.Module) -> None:
    with pytest.raises(RefusalError) as caught:
        fit(workload(model), "--checkpoint")
    assert str(caught.value) == (
        f"checkpointing: no part of {type(model).__name__} can be recomputed: none holds more than one layer, and a layer keeps "
        "its input either way; use --accumulate N to hold fewer activations at a time"
    )


class _Bare(nn.Module):
    """A block of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(shape) / 8) for shape in ((16, 64), (64, 16)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + F.gelu(rows @ self.up) @ self.down


class _First(nn.Module):
    def forward(self, outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return outputs[0]


@pytest.mark.parametrize(
    "inner",
    [
        lambda: [nn.LSTM(16, 16, num_layers=2, dropout=0.3), _First()],
        lambda: [nn.GRU(16, 16), _First()],
        lambda: [_Bare(), _Bare()],
    ],
    ids=["LSTM", "GRU", "parameters"],
)
def test_a_layer_that_keeps_more_than_its_input_is_recomputed(inner: Callable[[], list[nn.Module]]) -> None:
    runs = []
    for flags in ("", "--checkpoint"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), *inner(), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        with fit(workload(model), flags) as session:
            for _ in range(2):
                model(torch.randn(12, 5, 8)).square().mean().backward()
            notes = list(session.notes)
        runs.append(gradients(model))
    assert distance(*runs) == 0
    assert "recomputed: " in notes[0]


def test_code_of_torch_jit_is_refused() -> None:
    traced = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(1, 4))
    with pytest.raises(RefusalError) as caught:
        fit(workload(nn.Sequential(traced, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))), "--checkpoint")
    assert str(caught.value) == (
        "checkpointing: 0 is code of torch.jit, whose state cannot be put back to run it again; use --accumulate N or "
        "--offload activations"
    )


def test_gradients_of_single_samples_by_a_transform_are_left_alone() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

    def loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (row,)).sum()

    derive = torch.func.vmap(torch.func.grad(loss), (None, 0))
    weights, rows = dict(model.named_parameters()), torch.ones(3, 4)
    expected = derive(weights, rows)
    with fit(workload(model), "--checkpoint"):
        found = derive(weights, rows)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_model_that_checkpoints_itself_is_refused() -> None:
    model = gpt2()
    model.gradient_checkpointing_enable()
    with pytest.raises(RefusalError, match="already checkpoints its blocks by its own switch"):
        fit(workload(model), "--checkpoint")


@pytest.mark.parametrize("flags", ["--checkpoint", "--checkpoint --offload activations"])
def test_what_a_forward_changes_anywhere_is_changed_once(flags: str) -> None:
    def trained(flags: str) -> tuple[object, ...]:
        model, seen = chatty(3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with fit(Workload(model, optimizer), flags):
            for _ in range(2):
                model(torch.ones(4, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return changed(model, seen)

    assert trained(flags) == trained("")


class Learner(nn.Module):
    """Keeps running statistics in parameters without gradients, in lists, as loops for meta-learning do."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(16, 16) * 0.2) for _ in range(2))
        self.statistics = nn.ParameterList(
            nn.Parameter(value, requires_grad=False) for _ in range(2) for value in (torch.zeros(16), torch.ones(16))
        )
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        for place, weight in enumerate(self.weights):
            mean, variance = self.statistics[2 * place], self.statistics[2 * place + 1]
            rows = F.relu(F.batch_norm(F.linear(rows, weight), mean, variance, training=True))
        return rows


@pytest.mark.parametrize("flags", PLANS)
def test_statistics_in_parameters_without_gradients_are_updated_once(flags: str) -> None:
    def trained(flags: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Learner(), Learner(), Learner())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        with fit(Workload(model, optimizer), flags):
            for _ in range(3):
                model(torch.randn(8, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    found, expected = trained(flags), trained("")
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("in_blocks", [True, False])
def test_a_forward_pass_that_writes_through_data_to_what_a_part_has_used_is_refused(in_blocks: bool) -> None:
    model = Masked(in_blocks=in_blocks)
    model.register_buffer("seen", torch.zeros(()))
    model.enter.register_forward_hook(lambda *_: model.seen.add_(1) and None)
    with fit(workload(model), "--checkpoint"), pytest.raises(RefusalError) as error:
        model(torch.randn(16, 32), torch.zeros(16, 32, dtype=torch.bool))
    assert str(error.value) == (
        "checkpointing: the forward pass of Masked writes through .data to what a part of it has used, whose gradients would be "
        "others when it is computed again; use --offload activations, or --accumulate N"
    )
    assert model.seen.item() == 0
