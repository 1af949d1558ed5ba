"""The twin: the shapes of live objects, none of their values or memory, and nothing of them changed."""

from __future__ import annotations

import copy
import random
import threading
import tracemalloc
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab import Workload, fit, measure
from memlab.errors import TraceError
from memlab.plan import Plan
from memlab.predicting import predict
from memlab.runtime.batch import Batch
from memlab.session import in_force, session_of
from memlab.session.snapshot import Snapshot
from memlab.techniques.checkpointing.checkpointing import ActivationCheckpointing
from memlab.trace.tracer import Tracer
from memlab.trace.twin import Twin
from tests.helpers.fingerprint import differing, fingerprint
from tests.helpers.snapshots import changed_between
from tests.techniques.models import gpt2, ragged_batch

MIB = 2**20


class Net(nn.Module):
    """A network with everything a module may carry: buffers, a tied weight, attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.leave.weight = self.enter.weight
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.layers = [self.enter, self.leave]
        self.also_scale = self.scale
        self.settings = {"rates": [0.1, 0.2]}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.leave(self.enter(inputs)) * self.scale


def workload_of(model: nn.Module, **given: Any) -> Workload:
    batch = given.pop("batch", ((torch.randn(4, 8),), torch.randn(4, 8)))
    loss_fn = given.pop("loss_fn", F.mse_loss)
    return Workload(model, torch.optim.AdamW(model.parameters()), batch=batch, loss_fn=loss_fn, **given)


def agrees(workload: Workload, flags: str = "") -> bool:
    return predict(workload, flags).peak_allocated_bytes == pytest.approx(
        measure(workload, flags, steps=1).peak_allocated_bytes, rel=0.005
    )


# -- what the twin is --------------------------------------------------------------------------


def test_floats_are_fake_and_integers_are_copies() -> None:
    live = Net()
    twin = Twin(workload_of(live)).workload.model
    assert all(isinstance(parameter, FakeTensor) for parameter in twin.parameters())
    assert isinstance(twin.scale, FakeTensor)
    assert not isinstance(twin.steps, FakeTensor)
    assert twin.steps is not live.steps
    twin.steps += 5
    assert int(live.steps) == 0
    assert [p.shape for p in twin.parameters()] == [p.shape for p in live.parameters()]
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in live.parameters()]


def test_ties_and_references_are_those_of_the_model() -> None:
    twin = Twin(workload_of(Net())).workload.model
    assert twin.leave.weight is twin.enter.weight
    assert twin.layers[0] is twin.enter
    assert twin.also_scale is twin.scale
    assert len(list(twin.parameters())) == 2


def test_strides_and_dtypes_are_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3)).to(memory_format=torch.channels_last).bfloat16()
    twin = Twin(workload_of(model)).workload.model
    assert twin[0].weight.stride() == model[0].weight.stride()
    assert twin[0].weight.dtype is torch.bfloat16


def test_the_optimizer_has_settings_but_no_state() -> None:
    live = workload_of(Net())
    measure(live, steps=1, keep=True)
    optimizer = live.optimizers[0]
    optimizer.param_groups[0]["lr"] = 0.25
    twin = Twin(live).workload
    [copied] = twin.optimizers
    assert type(copied) is type(optimizer)
    assert copied.param_groups[0]["lr"] == 0.25
    assert not copied.state
    assert {id(p) for p in copied.param_groups[0]["params"]} == {id(p) for p in twin.model.parameters()}
    assert optimizer.state


_FORMS = [dict, lambda values: Batch((), values), lambda values: Batch((UserDict(values), threading.Lock()), {})]


@pytest.mark.parametrize("form", _FORMS, ids=["mapping", "call", "call with an object"])
def test_the_batch_is_copied_with_what_it_shares(form: Callable[[dict[str, Any]], Any]) -> None:
    ids = torch.arange(12).reshape(3, 4)
    values = {"input_ids": ids, "labels": ids, "names": ["a", "b"], "weights": torch.rand(3)}
    live = Workload(gpt2(64), batch=form(values))
    call = Batch.of(Twin(live).workload.batch)
    batch = call.kwargs or call.args[0]
    assert batch["labels"] is batch["input_ids"]
    assert batch["input_ids"] is not ids
    assert torch.equal(batch["input_ids"], ids)
    assert batch["names"] == ["a", "b"]
    assert isinstance(batch["weights"], FakeTensor)


def test_a_twin_under_a_plan_is_what_the_user_wrote() -> None:
    live = Workload(gpt2(64), None, batch=ragged_batch(64))
    live.optimizers = [torch.optim.AdamW(live.model.parameters())]
    with fit(live, "--precision pure-bf16 --checkpoint --adam8bit --accumulate 2"):
        assert next(live.model.parameters()).dtype is torch.bfloat16
        twin = Twin(live).workload
        assert {p.dtype for p in twin.model.parameters()} == {torch.float32}
        patched = [module for module in twin.model.modules() if "forward" in vars(module)]
        assert all(module.forward.func is type(module).forward for module in patched)
        assert all(module.forward.args == (module,) for module in patched)
        assert not twin.optimizers[0].state
        assert not twin.optimizers[0]._optimizer_step_pre_hooks


def test_hooks_of_the_user_are_left_behind_with_a_note() -> None:
    live, seen = Net(), []
    live.enter.register_forward_hook(lambda module, args, output: seen.append(output))
    live.enter.register_forward_pre_hook(lambda module, args: None)
    live.leave.register_full_backward_hook(lambda module, gradients, outputs: None)
    live.enter.weight.register_hook(seen.append)
    live.enter.weight.register_post_accumulate_grad_hook(seen.append)
    workload = workload_of(live)
    prediction = predict(workload)
    assert seen == []
    assert "3 hooks on modules left out of the prediction" in prediction.notes
    assert len(live.enter._forward_hooks) == 1


@pytest.mark.parametrize(
    "normalized",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
    ],
    ids=["weight norm", "spectral norm", "weight norm, parametrized", "spectral norm, parametrized", "orthogonal"],
)
def test_hooks_of_torch_come_along(normalized: Callable[[nn.Module], nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older forms are deprecated, and in use
        model = nn.Sequential(normalized(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8))
        workload = workload_of(model)
        assert predict(workload).notes == ()
        assert agrees(workload)


class WithHiddenStates(nn.Module):
    """A classifier over a hidden state that Transformers collects by hooks, which its first call registers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = gpt2().transformer
        self.head = nn.Linear(self.body.config.n_embd, 5)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        states = self.body(input_ids, output_hidden_states=True).hidden_states
        return self.head(states[1] + states[-1]).square().mean()


def test_hooks_of_transformers_come_along() -> None:
    model, batch = WithHiddenStates(), {"input_ids": ragged_batch()["input_ids"]}
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch)
    model(**batch)
    assert any(module._forward_hooks for module in model.modules())
    assert predict(workload).notes == ()
    assert agrees(workload)


# -- what cannot be copied ---------------------------------------------------------------------


class WithLock(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock, self.endless = threading.Lock(), (number for number in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return super().forward(inputs)


def test_what_cannot_be_copied_is_shared() -> None:
    live = WithLock()
    workload = workload_of(live)
    twin = Twin(workload).workload.model
    assert twin.lock is live.lock
    assert twin.enter is not live.enter
    assert twin.leave.weight is twin.enter.weight
    assert twin.also_scale is twin.scale
    assert isinstance(twin.enter.weight, FakeTensor)
    assert agrees(workload)
    assert not live.lock.locked()


def test_a_model_that_refuses_to_be_copied_is_named() -> None:
    class Unique(Net):
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            raise RuntimeError("there can be only one")

    with pytest.raises(TraceError, match=r"model Unique cannot be copied .*only one.*measure\(workload, plan\)"):
        predict(workload_of(Unique()))


def test_sparse_tensors_are_refused() -> None:
    model = Net()
    model.register_buffer("graph", torch.eye(4).to_sparse())
    with pytest.raises(TraceError, match="sparse_coo tensor"):
        Twin(workload_of(model))


# -- nothing of the live objects changes -------------------------------------------------------


def state_of_everything(workload: Workload) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint(workload.model, workload.optimizers, [workload.scheduler]),
        "values": Snapshot(workload),
        "versions": [p._version for p in workload.model.parameters()],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad._version) for p in workload.model.parameters()],
        "batch": copy.deepcopy(workload.batch),
        "scheduler": workload.scheduler.state_dict(),
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),  # noqa: NPY002
        "threads": threading.active_count(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attributes": {name: sorted(vars(module)) for name, module in workload.model.named_modules()},
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert not differing(before.pop("fingerprint"), after.pop("fingerprint"))
    assert not changed_between(before.pop("values"), after.pop("values"))
    batches = before.pop("batch"), after.pop("batch")
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])
    assert before == after


@pytest.fixture
def trained() -> Workload:
    """A model in the middle of a training: state, gradients, a scheduler, dropout, some modules in eval mode."""
    model = gpt2(256, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    batch = ragged_batch(256)
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model(**batch).loss.backward()
    model.transformer.h[0].eval()
    return Workload(model, optimizer, batch=batch, scheduler=scheduler)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--accumulate 2",
        "--checkpoint selective",
        "--precision pure-bf16",
        "--adam8bit --offload optimizer",
        "--offload activations",
        "--bf16 --optim adafactor",
    ],
)
def test_a_prediction_changes_nothing(trained: Workload, flags: str) -> None:
    before = state_of_everything(trained)
    predict(trained, flags)
    assert_same(before, state_of_everything(trained))


def test_a_prediction_for_a_gpu_changes_nothing(trained: Workload) -> None:
    before = state_of_everything(trained)
    predict(trained, "--accumulate 2 --fp16", "T4")
    assert_same(before, state_of_everything(trained))


def test_a_prediction_that_fails_changes_nothing(trained: Workload) -> None:
    def reading(*args: Any, **kwargs: Any) -> Any:
        output = type(trained.model).forward(trained.model, *args, **kwargs)
        if output.loss.item() > 0:
            return output
        raise AssertionError

    trained.model.forward = reading
    before = state_of_everything(trained)
    with pytest.raises(TraceError):
        predict(trained, "--checkpoint --adam8bit")
    assert_same(before, state_of_everything(trained))


@pytest.mark.few(0, full=1)
@pytest.mark.parametrize(
    "in_force",
    [
        "--accumulate 2",
        "--checkpoint",
        "--precision pure-bf16",
        "--adam8bit",
        "--optim adafactor",
        "--optim lion8bit",
        "--optim adamw4bit",
        "--optim apollo",
        "--offload optimizer",
        "--offload activations --bf16",
        "--precision pure-bf16 --adam8bit --offload optimizer,activations --accumulate 2",
    ],
)
def test_the_plan_in_force_changes_no_prediction(in_force: str) -> None:
    plans = ("", "--accumulate 4 --adam8bit", "--checkpoint --precision pure-bf16")
    model = gpt2(256)
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch=ragged_batch(256))
    without = [predict(workload, flags).peak_allocated_bytes for flags in plans]
    with fit(workload, in_force) as session:
        before = fingerprint(model, workload.optimizers)
        assert [predict(workload, flags).peak_allocated_bytes for flags in plans] == without
        assert not differing(before, fingerprint(model, workload.optimizers))
        assert session.plan == Plan.parse(in_force)
        model(**workload.batch).loss.backward()
        workload.optimizers[0].step()
        assert [predict(workload, flags).peak_allocated_bytes for flags in plans] == without
    assert predict(workload).peak_allocated_bytes == without[0]


# -- memory ------------------------------------------------------------------------------------


def test_a_plan_that_fails_on_a_twin_is_taken_out_again_without_a_memory_of_what_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Remembering the live objects by reference is a good part of the time of a prediction."""

    def must_not(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(in_force, "Rollback", must_not)
    model = gpt2()
    twin = Twin(Workload(model, torch.optim.AdamW(model.parameters()), batch=ragged_batch())).workload
    before = [(dict(vars(module)), {**module._forward_pre_hooks}) for module in twin.model.modules()]
    attach = ActivationCheckpointing.attach_model

    def fails(self: ActivationCheckpointing, workload: Workload, undo: Any) -> None:
        attach(self, workload, undo)
        raise ValueError

    with fit(twin, "--checkpoint --bf16"):
        pass
    monkeypatch.setattr(ActivationCheckpointing, "attach_model", fails)
    with pytest.raises(ValueError):
        fit(twin, "--checkpoint --bf16")
    assert [(dict(vars(module)), {**module._forward_pre_hooks}) for module in twin.model.modules()] == before
    assert session_of(twin.model) is None


def test_a_billion_parameters_take_no_memory() -> None:
    """Parameters on the meta device stand for a model nobody here could hold."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(15)))
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch=torch.zeros(4, 8192))
    count = sum(p.numel() for p in model.parameters())
    assert count > 1e9
    tracemalloc.start()
    try:
        prediction = predict(workload, device="cpu")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert prediction.peak_allocated_bytes >= 16 * count
    assert prediction.breakdown["optimizer state"] == pytest.approx(8 * count, rel=1e-3)
    assert peak_bytes < 16 * MIB


def test_no_storage_of_a_step_is_real_beyond_its_integers() -> None:
    model = gpt2(4096)
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch=ragged_batch(4096))
    born: list[int] = []
    fakes = Tracer(workload)

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if type(out) is torch.Tensor and out.device.type == "cpu":
                born.append(out.untyped_storage().nbytes())
            return out

    with Watching():
        fakes.one_pass(Plan())
    assert max(born, default=0) < MIB
    assert any(isinstance(p, FakeTensor) for p in fakes.twin.workload.model.parameters())
