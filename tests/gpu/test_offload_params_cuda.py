"""Parameters of blocks on the host beside a GPU: what only two devices and streams can show."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

from memlab import RefusalError, Workload, fit, measure
from memlab.measuring.runs import training_step
from memlab.plan import Plan
from memlab.session.snapshot import Snapshot
from tests.helpers.snapshots import changed_between
from tests.techniques.models import distance, gpt2, gradients, ragged_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def batch(rows: int = 8) -> dict[str, torch.Tensor]:
    return {key: value.cuda() for key, value in ragged_batch(vocabulary=512, rows=rows).items()}


def load(**settings: Any) -> Workload:
    model = gpt2(vocabulary=512, layers=8, width=256).cuda()
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4, **settings), batch=batch())


def blocks_of(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.transformer.h.parameters() if p.numel() >= 1024]


def test_parameters_and_gradients_rest_on_the_host() -> None:
    work = load()
    model: Any = work.model
    with fit(work, "--offload params"):
        with torch._C.DisableTorchFunctionSubclass():
            assert all(p.device.type == "cpu" and p.is_pinned() for p in blocks_of(model))
        assert model.device.type == "cuda"
        model(**batch()).loss.backward()
        with torch._C.DisableTorchFunctionSubclass():
            assert all(p.grad is not None and p.grad.device == p.device for p in model.parameters())
    assert all(p.is_cuda and p.grad is not None and p.grad.is_cuda for p in model.parameters())


@pytest.mark.parametrize("rescue", [False, True])
@pytest.mark.parametrize("flags", ["--offload params", "--checkpoint --offload params", "--bf16 --offload params"])
def test_gradients_add_up_over_backward_passes(flags: str, rescue: bool) -> None:
    work = load()
    plain = flags.replace("--offload params", "").strip()
    found = []
    for plan in (plain, flags):
        with fit(work, plan, rescue=rescue):
            for rows in (2, 4, 8):
                work.model(**batch(rows)).loss.backward()
        found.append(gradients(work.model))
    # the embedding's gradient is summed by atomics, in another order every time
    assert distance(found[1], found[0]) < 5e-6


def test_one_backward_pass_through_two_calls() -> None:
    work = load()
    found = []
    for plan in ("", "--offload params"):
        with fit(work, plan):
            (work.model(**batch(2)).loss + work.model(**batch(4)).loss).backward()
        found.append(gradients(work.model))
    assert distance(found[1], found[0]) < 5e-6


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"capturable": True}])
@pytest.mark.parametrize("flags", ["--offload params", "--checkpoint --offload params,optimizer"])
def test_training_is_the_same(flags: str, settings: dict[str, bool]) -> None:
    ends = []
    for plan in ("", flags):
        work = load(**settings)
        with fit(work, plan):
            for _ in range(10):
                work.model(**batch()).loss.backward()
                torch.nn.utils.clip_grad_norm_(work.model.parameters(), 1.0)
                work.optimizers[0].step()
                work.optimizers[0].zero_grad()
        ends.append([p.detach().clone() for p in work.model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}])
def test_state_that_is_loaded_goes_on(settings: dict[str, bool]) -> None:
    work = load(**settings)
    (optimizer,) = work.optimizers
    with fit(work, "--offload params") as session:
        training_step(work)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        training_step(work)
        session.switch("--offload params,optimizer", now=True)
        training_step(work)
        session.switch("--offload params", now=True)
        assert all(v.is_cuda for s in optimizer.state.values() for v in s.values() if v.dim())
        training_step(work)


@pytest.mark.memory
@pytest.mark.parametrize("flags", ["--offload params", "--checkpoint --offload params"])
def test_little_is_on_the_device_between_passes(flags: str) -> None:
    work = load()
    with fit(work, flags):
        training_step(work)
        work.optimizers[0].zero_grad()
        gc.collect()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            work.model(**batch())
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < 2**20


@pytest.mark.memory
def test_the_peak_is_below_the_size_of_the_model() -> None:
    work = load()
    training_step(work)
    work.optimizers[0].zero_grad()
    whole = sum(p.numel() * p.element_size() for p in work.model.parameters())
    kept, offloaded = (
        measure(work, plan, steps=3) for plan in ("--checkpoint", "--checkpoint --offload params,optimizer")
    )
    assert kept.peak_allocated_bytes - offloaded.peak_allocated_bytes > 2.5 * whole


def test_values_written_on_the_host_are_the_ones_used() -> None:
    work = load()
    model: Any = work.model
    with fit(work, "--offload params"), torch.no_grad():
        for _ in range(20):
            model(**batch())
            for parameter in blocks_of(model):  # while the device may still be busy with the pass
                parameter.mul_(1.01)
        found = model(**batch()).loss
    with torch.no_grad():
        torch.testing.assert_close(model(**batch()).loss, found)


def test_undo_is_exact_and_gives_the_host_back() -> None:
    work = load()
    training_step(work)
    before = Snapshot(work)
    session = fit(work, "--offload params,optimizer")
    session.undo()
    assert changed_between(before, Snapshot(work)) == []


def test_the_loops_own_scaler_is_refused() -> None:
    work = load()
    scaler = torch.amp.GradScaler("cuda")
    with fit(work, "--offload params"), pytest.raises(RefusalError, match="GradScaler"):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = work.model(**batch()).loss
        scaler.scale(loss).backward()
        scaler.step(work.optimizers[0])


@pytest.mark.parametrize("then", ["--precision pure-bf16", "--offload params", ""])
def test_weights_that_the_loop_has_looked_at_under_pure_bf16_come_back_to_the_gpu(then: str) -> None:
    """What a loop reads of weights between steps lies on the host; a change of the plan brings them back all the same."""
    model, batch = gpt2().cuda(), {name: value.cuda() for name, value in ragged_batch().items()}
    load = Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)
    with fit(load, "--precision pure-bf16 --offload params") as session:
        for plan in ("--precision pure-bf16 --offload params", then):
            training_step(load)
            seen = [parameter.data.clone() for parameter in model.parameters()]
            session.switch(plan, now=True)
            values = copy.deepcopy(model).parameters()  # copies are the user's own
            assert all(torch.equal(one.cpu(), other.detach().cpu()) for one, other in zip(seen, values, strict=True))
        training_step(load)
        [parameter.data for parameter in model.parameters()]
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {("cuda", torch.float32)}


def test_what_the_loop_has_built_on_weights_before_the_plan_comes_is_theirs() -> None:
    ends = []
    for plan in ("", "--offload params"):
        work = load()
        with fit(work) as session:
            for step in range(3):
                penalty = sum(weight.square().sum() for weight in blocks_of(work.model))
                if step == 1:
                    session.switching.ask(Plan.parse(plan))  # a click: it comes with the model's call
                (work.model(**batch()).loss + 1e-3 * penalty).backward()
                with torch._C.DisableTorchFunctionSubclass():
                    resting = sum(weight.device.type == "cpu" for weight in blocks_of(work.model))
                assert resting == len(blocks_of(work.model)) * (step == 2 and bool(plan))
                work.optimizers[0].step()
                work.optimizers[0].zero_grad()
        ends.append([p.detach().clone() for p in work.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
