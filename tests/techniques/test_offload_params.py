"""Parameters of blocks off the device."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memlab import RefusalError, Workload, fit, measure, predict
from memlab.inferring.weights import HalfWeights
from memlab.measuring.device import Device
from memlab.measuring.runs import training_step
from memlab.plan import Precision
from memlab.records import Category
from memlab.runtime.modules import repeated_blocks
from memlab.runtime.stand_ins import stand_in
from memlab.session.snapshot import Snapshot
from memlab.techniques.offload.spill import is_spilled
from tests.helpers.snapshots import changed_between
from tests.techniques.models import distance, gpt2, gradients, ragged_batch, workload

MIB = 2**20


def deep(vocabulary: int = 64, layers: int = 6, **options: Any) -> nn.Module:
    """A model whose parameters are in its blocks."""
    return gpt2(vocabulary=vocabulary, layers=layers, **options)


def batch(rows: int = 4) -> dict[str, torch.Tensor]:
    return ragged_batch(vocabulary=64, rows=rows, length=24)


def at_rest(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and is_spilled(tensor.untyped_storage())


def streamed(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if at_rest(p)]


def losses(flags: str, steps: int = 6, *, rescue: bool = False, dropout: float = 0.2, **settings: Any) -> list[float]:
    """Losses of a loop that clips, with its random numbers from a seed; the undo is checked."""
    model = deep(dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **settings)
    load, found = Workload(model, optimizer), []
    torch.manual_seed(3)
    with fit(load, flags, rescue=rescue):
        for _ in range(steps):
            loss = model(**batch()).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        before = Snapshot(load)
    if "bit" not in flags and "pure" not in flags:  # whose own way back is close, not to the bit
        assert changed_between(before, Snapshot(load)) == []
    assert streamed(model) == []
    return found


# -- exactness -----------------------------------------------------------------------------------------


@pytest.mark.few(3, full=8)
@pytest.mark.parametrize("rescue", [False, True])
@pytest.mark.parametrize(
    "flags",
    ["", "--accumulate 2", "--checkpoint", "--checkpoint selective", "--bf16", "--fp16", "--checkpoint --bf16",
     "--offload activations", "--offload optimizer", "--adam8bit"],
)  # fmt: skip
def test_losses_are_those_without_it_to_the_bit(flags: str, rescue: bool) -> None:
    together = f"{flags},params" if "--offload" in flags else f"{flags} --offload params".strip()
    assert losses(together, rescue=rescue) == losses(flags)


def test_pure_bf16_rounds_its_moments_by_other_random_numbers() -> None:
    # buckets are smaller, so moments are rounded in another order
    pairs = zip(losses("--precision pure-bf16 --offload params"), losses("--precision pure-bf16"), strict=True)
    assert max(abs(one - other) / other for one, other in pairs) < 1e-3


@pytest.mark.parametrize("rescue", [False, True])
def test_gradients_add_up_over_backward_passes(rescue: bool) -> None:
    model = deep()
    parts = [{name: value[rows] for name, value in batch().items()} for rows in (slice(2), slice(2, 4))]
    for part in parts:
        model(**part).loss.backward()
    expected = gradients(model)
    with fit(workload(model), "--offload params", rescue=rescue):
        for part in parts:
            model(**part).loss.backward()
            assert all(at_rest(p.grad) for p in streamed(model))
        assert distance(gradients(model), expected) == 0


def test_checkpoints_do_not_take_frozen_weights_that_leave_the_device_for_written_ones() -> None:
    """Another tensor may be written where a weight's copy was, once that has gone: peaks differed from run to run."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(4)]
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(*blocks).requires_grad_(False), nn.Linear(64, 8))
    load = Workload(
        model, torch.optim.AdamW(model.parameters()), (torch.randn(16, 64), torch.randn(16, 8)), nn.MSELoss()
    )
    predicted = predict(load, "--checkpoint --offload params").peak_allocated_bytes
    for steps in (1, 2, 4):
        assert measure(load, "--checkpoint --offload params", steps).peak_allocated_bytes == predicted


def test_gradients_can_be_zeroed_in_place() -> None:
    model = deep()
    with fit(workload(model), "--offload params"):
        model(**batch()).loss.backward()
        model.zero_grad(set_to_none=False)
        assert all(at_rest(p.grad) for p in streamed(model))
        model(**batch()).loss.backward()
    found = gradients(model)
    model(**batch()).loss.backward()
    assert distance(found, gradients(model)) == 0


@pytest.mark.parametrize("flags", ["--offload params", "--checkpoint --precision pure-bf16 --offload params,optimizer"])
def test_gradients_can_be_detached_in_place_and_zeroed(flags: str) -> None:
    """Loops that zero by hand do so, and torch refuses it for views."""
    model = deep()
    load = workload(model)
    with fit(load, flags):
        for _ in range(2):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.detach_()
                    parameter.grad.zero_()
            model(**batch()).loss.backward()
            load.optimizers[0].step()
    assert all(not p.grad._is_view() for p in model.parameters() if p.grad is not None)


def test_a_gradient_somebody_has_kept_stays_what_it_was() -> None:
    model = deep()
    load = workload(model)
    with fit(load, "--offload params"):
        model(**batch()).loss.backward()
        kept = [p.grad for p in streamed(model)]
        copies = [gradient.clone() for gradient in kept]
        model.zero_grad()
        model(**batch(2)).loss.backward()
        assert all(torch.equal(*pair) for pair in zip(kept, copies, strict=True))


@pytest.mark.parametrize("kind", ["foreach", "fused", "sgd", "groups", "two"])
def test_other_optimizers(kind: str) -> None:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = list(model.parameters())
        if kind == "sgd":
            return [torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)]
        if kind == "groups":
            few = [{"params": parameters[:7], "lr": 1e-2}, {"params": parameters[7:], "weight_decay": 0.1}]
            return [torch.optim.AdamW(few)]
        if kind == "two":
            return [torch.optim.AdamW(parameters[::2]), torch.optim.RMSprop(parameters[1::2], lr=1e-3)]
        return [torch.optim.AdamW(parameters, **{kind: True})]

    def run(flags: str) -> list[torch.Tensor]:
        model = deep()
        own = optimizers(model)
        with fit(Workload(model, own), flags):
            for _ in range(3):
                model(**batch()).loss.backward()
                for optimizer in own:
                    optimizer.step()
                    optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    for found, expected in zip(run("--offload params"), run(""), strict=True):
        assert torch.equal(found, expected)


def test_frozen_blocks_with_small_trained_parts() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = nn.Linear(64, 64), nn.Linear(64, 4), nn.Linear(4, 64)
            self.base.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.base(x) + self.up(self.down(x)))

    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(4)))
    x = torch.randn(8, 64)
    model(x).square().mean().backward()
    expected = gradients(model)
    with fit(
        Workload(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])), "--offload params"
    ):
        model(x).square().mean().backward()
        # the very first parameter stays: loops ask it for the device
        assert [at_rest(block.base.weight) for block in model] == [False, True, True, True]
        assert distance(gradients(model), expected) == 0


def test_ties_and_layouts() -> None:
    class Tied(nn.Module):
        def __init__(self, shared: nn.Linear) -> None:
            super().__init__()
            self.one, self.conv = nn.Linear(64, 64), nn.Conv2d(1, 64, 8)
            self.conv.to(memory_format=torch.channels_last)
            self.other = nn.Linear(64, 64)
            self.other.weight = self.one.weight
            self.shared = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.shared(torch.tanh(self.other(self.one(x)))) + self.conv(x.view(-1, 1, 8, 8)).flatten(1)

    torch.manual_seed(0)
    shared = nn.Linear(64, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(*(Tied(shared) for _ in range(3))))
    x = torch.randn(8, 64)
    model(x).square().mean().backward()
    expected = gradients(model)
    strides = [p.stride() for p in model.parameters()]
    load = Workload(model, torch.optim.AdamW(model.parameters()))
    with fit(load, "--offload params"):
        assert at_rest(shared.weight)
        assert model[1][0].one.weight is model[1][0].other.weight
        model(x).square().mean().backward()
        assert [p.stride() for p in model.parameters()] == strides
        assert distance(gradients(model), expected) == 0
    assert [p.stride() for p in model.parameters()] == strides


def test_a_weight_shared_with_the_rest_of_the_model_stays() -> None:
    model = deep()
    model.transformer.h[2].mlp.extra = model.transformer.wte
    with fit(workload(model), "--offload params"):
        assert not at_rest(model.transformer.wte.weight)
        assert at_rest(model.transformer.h[2].mlp.c_fc.weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_of_traced_parts_stay() -> None:
    """Code of TorchScript reads its own weights, which nothing can be put in place of."""

    def after_steps(flags: str) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3)]
        blocks[1][2] = torch.jit.trace(blocks[1][2], torch.ones(2, 64))
        model = nn.Sequential(*blocks)
        with fit(workload(model), flags):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            moved = len(streamed(model))
            for _ in range(2):
                model(torch.ones(2, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], moved

    expected, found = after_steps(""), after_steps("--offload params")
    assert (expected[1], found[1]) == (0, 4)  # of six weights one is the model's first, and one is traced
    assert all(map(torch.equal, expected[0], found[0]))


def test_without_gradients_and_generating() -> None:
    model = deep().eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits
    told = model.generate(ids, max_new_tokens=5, do_sample=False)
    with fit(workload(model), "--offload params"):
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected)
        with torch.inference_mode():
            assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), told)
        assert all(at_rest(p) for block in model.transformer.h for p in (block.mlp.c_fc.weight,))
    training_step(Workload(model.train(), torch.optim.AdamW(model.parameters()), batch=batch()))


def test_gradients_of_each_row_by_transforms_of_torch_func() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
    rows = torch.randn(4, 32)

    def per_row() -> dict[str, torch.Tensor]:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, weights, (row,)).square().mean()

        found: dict[str, torch.Tensor] = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, rows)
        return found

    expected = per_row()
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), "--offload params"):
        assert streamed(model)
        found = per_row()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_gradient_of_gradients() -> None:
    tower = nn.Sequential(
        nn.Linear(8, 64), nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    )
    x = torch.randn(4, 8, requires_grad=True)

    def penalised() -> list[torch.Tensor]:
        (inputs,) = torch.autograd.grad(tower(x).sum(), x, create_graph=True)
        inputs.square().sum().backward()
        x.grad = None
        return gradients(tower)

    expected = penalised()
    with fit(Workload(tower, torch.optim.AdamW(tower.parameters())), "--offload params"):
        assert distance(penalised(), expected) == 0


@pytest.mark.parametrize("order", [("--checkpoint", "--offload params"), ("--offload params", "--checkpoint")])
def test_it_comes_and_goes_beside_checkpointing(order: tuple[str, str]) -> None:
    model = deep(dropout=0.2)
    load = workload(model)
    torch.manual_seed(3)
    model(**batch()).loss.backward()
    expected = gradients(model)
    forwards = [block.__dict__.get("forward") for block in model.transformer.h]
    with fit(load, order[0]) as session:
        for plan in ("--checkpoint --offload params", order[1], "--checkpoint --offload params", order[0]):
            session.switch(plan, now=True)
            torch.manual_seed(3)
            model(**batch()).loss.backward()
            assert distance(gradients(model), expected) == 0
    assert [block.__dict__.get("forward") for block in model.transformer.h] == forwards
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in model.transformer.h)


def test_recomputation_by_the_models_own_switch() -> None:
    model = deep(dropout=0.2)
    model.gradient_checkpointing_enable()
    torch.manual_seed(3)
    model(**batch()).loss.backward()
    expected = gradients(model)
    with fit(workload(model), "--offload params"):
        torch.manual_seed(3)
        model(**batch()).loss.backward()
        assert distance(gradients(model), expected) == 0


def test_release_frees_gradients_and_streams_weights() -> None:
    def run(flags: str) -> list[torch.Tensor]:
        model = deep()
        optimizer = torch.optim.AdamW(model.parameters())
        with fit(Workload(model, optimizer), flags):
            for _ in range(4):
                model(**batch()).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    for found, expected in zip(run("--release-grads --offload params,optimizer"), run(""), strict=True):
        assert torch.equal(found, expected)


# -- where things are ------------------------------------------------------------------------------------


def test_values_are_there_between_uses() -> None:
    model = deep()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    identities = [id(p) for p in model.parameters()]
    load = workload(model)
    with fit(load, "--offload params"):
        assert [id(p) for p in model.parameters()] == identities
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        loss = model(**batch()).loss
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        loss.backward()
        written = {name: 2 * value for name, value in before.items()}
        model.load_state_dict(written)
        again = model(**batch()).loss
    assert all(torch.equal(value, written[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(**batch()).loss, again)


def test_what_a_forward_writes_into_a_weight_is_kept() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.layer.weight.clamp_(-0.01, 0.01)
            return self.layer(x)

    model = nn.Sequential(*(Clamped() for _ in range(3)))
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), "--offload params"):
        model(torch.randn(2, 64)).sum().backward()
    assert all(float(block.layer.weight.detach().abs().max()) <= 0.01 for block in model)


def test_parameters_and_gradients_leave_the_device() -> None:
    model = deep(layers=8, width=128)
    load = workload(model, **batch())
    training_step(load)
    flags = ("--checkpoint", "--checkpoint --offload params", "--checkpoint --offload params,optimizer")
    kept, params, both = (measure(load, plan, steps=2) for plan in flags)
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    assert params.breakdown[Category.PARAMETERS] < 0.1 * everything
    assert params.breakdown.get(Category.GRADIENTS, 0) < 0.1 * everything
    assert kept.peak_allocated_bytes - params.peak_allocated_bytes > 1.5 * everything
    assert kept.peak_allocated_bytes - both.peak_allocated_bytes > 3.2 * everything
    assert params.host_bytes > 1.8 * everything


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", ["", "--accumulate 2", "--bf16", "--checkpoint --bf16"])
def test_weights_are_not_kept_for_the_backward_pass(flags: str) -> None:
    model = deep(layers=8, width=128)
    load = workload(model, **batch())
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    with fit(load, f"{flags} --offload params".strip()):
        loss = model(**batch()).loss
        gc.collect()
        alive = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if isinstance(t, torch.Tensor) and not at_rest(t) and t.shape in {p.shape for p in streamed(model)}
        }
        assert sum(alive.values()) < 0.05 * everything
        loss.backward()


def test_a_model_larger_than_the_device_trains() -> None:
    model = deep(layers=12, width=128)
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    load = workload(model, **batch(2))
    device = Device(int(0.7 * everything))
    for flags in ("--checkpoint", "--checkpoint --offload optimizer,activations"):
        with pytest.raises(torch.OutOfMemoryError):
            measure(load, flags, steps=2, device=device)
    assert measure(load, "--checkpoint --offload params,optimizer", steps=2, device=device).fits


def test_a_rescue_finds_it() -> None:
    model = deep(layers=12, width=128)
    load = workload(model, **batch(1))
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    fits = measure(load, "--checkpoint --offload params,optimizer,activations", steps=2).peak_allocated_bytes
    assert fits < 1.2 * everything
    session = fit(load, rescue=True)
    with Device(int(1.5 * everything)).ledger() as ledger:
        ledger.begin((Category.PARAMETERS, p) for p in model.parameters())
        for _ in range(2):
            training_step(load)
    assert "params" in str(session.plan)
    session.undo()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "flags",
    ["--offload params", "--checkpoint --offload params,optimizer", "--accumulate 2 --offload params,activations",
     "--bf16 --checkpoint --offload params", "--release-grads --offload params", "--adam8bit --offload params"],
)  # fmt: skip
def test_predictions_agree_with_the_ledger(flags: str) -> None:
    load = workload(deep(layers=4, width=128), **batch())
    training_step(load)
    measured, predicted = measure(load, flags, steps=2), predict(load, flags)
    assert abs(predicted.peak_allocated_bytes / measured.peak_allocated_bytes - 1) < 0.005
    assert abs(predicted.host_bytes / measured.host_bytes - 1) < 0.005


def test_nothing_is_left_behind() -> None:
    from memlab.runtime import homes
    from memlab.techniques.offload.spill import spilled_storages

    gc.collect()
    before = len(spilled_storages), len(homes._homes)
    model = deep()
    load = workload(model, **batch())
    session = fit(load, "--offload params,optimizer")
    training_step(load)
    session.undo()
    watched = weakref.ref(session)
    del session
    gc.collect()
    assert watched() is None
    assert (len(spilled_storages), len(homes._homes)) == before
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("flags", ["--offload params", "--offload params --bf16"])
def test_an_interrupted_forward_leaves_everything_at_rest(flags: str) -> None:
    model = deep()
    load = workload(model)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with fit(load, flags):
        resting = len(streamed(model))
        handle = model.transformer.h[3].mlp.register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(**batch())
        handle.remove()
        assert len(streamed(model)) == resting
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
        model(**batch()).loss.backward()
    found = gradients(model)
    model(**batch()).loss.backward()
    assert distance(found, gradients(model)) < (3e-2 if "bf16" in flags else 1e-12)


@pytest.mark.parametrize("flags", ["--offload params", "--checkpoint --offload params"])
def test_a_ctrl_c_in_a_micro_batch_that_the_backward_pass_runs(flags: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(3)))
    load = workload(model)
    first, rows = model[0][1], torch.randn(4, 32)
    before = Snapshot(load)

    def interrupted(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            handle.remove()
            raise KeyboardInterrupt

    with fit(load, f"--accumulate 2 {flags}"):
        handle = first.register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(rows).square().mean().backward()
        model.zero_grad()
    assert changed_between(before, Snapshot(load)) == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_copies_and_pickles_of_the_model_are_plain() -> None:
    model = deep()
    with fit(workload(model), "--offload params"):
        copied = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        expected = model(**batch()).loss
    for other in (copied, loaded):
        assert streamed(other) == []
        assert torch.equal(other(**batch()).loss, expected)


def test_data_that_somebody_puts_into_a_parameter_is_used() -> None:
    model = deep()
    weight = model.transformer.h[1].mlp.c_fc.weight
    own = torch.zeros_like(weight)
    with fit(workload(model), "--offload params"):
        weight.data = own
        inside = model(**batch()).loss
        assert weight.data_ptr() == own.data_ptr()
    assert weight.data_ptr() == own.data_ptr()
    assert torch.equal(model(**batch()).loss, inside)


def test_optimizer_checkpoints_are_plain() -> None:
    model = deep()
    load = workload(model, **batch())
    (optimizer,) = load.optimizers
    with fit(load, "--offload params,optimizer"):
        training_step(load)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(copy.deepcopy(saved))
        training_step(load)
    other = deep()
    plain = workload(other, **batch())
    training_step(plain)
    expected = copy.deepcopy(plain.optimizers[0].state_dict()["state"])
    for key, state in saved["state"].items():
        for name, value in state.items():
            assert torch.equal(value, expected[key][name])
    training_step(plain)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [
        (
            nn.Linear(64, 64), "--offload params",
            "offload: params: Linear repeats no block (a ModuleList or Sequential of several modules that have parts, all of one class); "
            "use --offload optimizer,activations",
        ),
        (
            nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))), "--offload params",
            "offload: params: no parameter in the blocks of Sequential is large enough (1024 elements) and its own to be "
            "moved; use --offload optimizer,activations",
        ),
        (
            nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))).share_memory(), "--offload params",
            "offload: params: no parameter in the blocks of Sequential is large enough (1024 elements) and its own to be "
            "moved; use --offload optimizer,activations",
        ),
        (
            nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))), "--offload params:host",
            "offload: params to host: the model is on the CPU, whose memory is the host's; "
            "use --offload params:disk (the default there)",
        ),
    ],
)  # fmt: skip
def test_refusals(model: nn.Module, flags: str, said: str) -> None:
    with pytest.raises(RefusalError) as caught:
        fit(Workload(model, torch.optim.AdamW(model.parameters())), flags)
    assert str(caught.value) == said


def test_half_weights_for_inference_are_refused() -> None:
    model = deep().eval()
    with (
        fit(workload(model), "--offload params"),
        pytest.raises(RefusalError, match="--offload params is in force"),
    ):
        HalfWeights(model, Precision.BF16)
    HalfWeights(model, Precision.BF16)


def test_lbfgs_is_refused() -> None:
    model = deep()
    with pytest.raises(RefusalError, match="LBFGS updates all parameters at once"):
        fit(Workload(model, torch.optim.LBFGS(model.parameters())), "--offload params")


def test_patches_of_one_forward_over_another() -> None:
    from contextlib import ExitStack

    (block, *_) = repeated_blocks(deep())
    said = []
    with ExitStack() as undo:
        for name in ("inner", "outer"):
            original = block.forward

            def patched(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
                said.append(_name)
                return _original(*args, **kwargs)

            patched.__dict__.update(getattr(original, "__dict__", {}))  # as `functools.wraps` does
            stand_in(block, "forward", patched, undo)
        block(torch.randn(1, 3, 64))
    assert said == ["outer", "inner"]
    assert "forward" not in vars(block)


# -- what the loop holds of weights ------------------------------------------------------------------


HOLDS: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda weight: weight.data,
    "an array": lambda weight: weight.detach().numpy(),
    "a view": lambda weight: weight.detach().view(-1)[:4],
}


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("when", ["before", "in the plan"])
def test_what_the_loop_holds_of_a_weight_stays_its_memory(when: str, hold: str) -> None:
    model = deep()
    weight = max(model.transformer.h[1].parameters(), key=lambda each: each.numel())
    held = HOLDS[hold](weight) if when == "before" else None
    with fit(workload(model), "--offload params") as session:
        notes = [note for technique in session.techniques for note in technique.notes]
        assert any("weights stay where they are: the loop holds their values" in note for note in notes) is (
            when == "before"
        )
        held = HOLDS[hold](weight) if held is None else held
        model(**batch()).loss.backward()
    held[:] = 0.5

    values = weight.detach().flatten()
    assert torch.equal(values[:4], torch.full((4,), 0.5))


def test_weights_that_are_all_held_are_refused() -> None:
    model = deep()
    _state = model.state_dict()

    with pytest.raises(RefusalError, match="the loop holds the values of all weights in the blocks") as refused:
        fit(workload(model), "--offload params")

    assert "let go of them first (del)" in str(refused.value)
