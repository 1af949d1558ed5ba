"""Optimizer techniques on a CUDA device: pinned host memory, paged moments, scaled gradients."""

from __future__ import annotations

import copy

import pytest
import torch

from memlab.techniques.offload import link as _link
from memlab.techniques.offload.link import Link
from memlab.techniques.precision.moments import join_master, round_stochastically, split_master
from tests.driving import applied, assert_recovers_anywhere, mlp, same, snapshot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def state_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the link of this machine: updates on the host are not bit for bit those of the GPU."""
    monkeypatch.setattr(_link, "measured", lambda _device: Link(down=1e12, up=1e12, both=1e12, updated=1e9))


def model_and_optimizer(fused: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = mlp(width=1024).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).cuda()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs[:, :1].sin())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("flags", ["--offload optimizer", "--offload optimizer:disk"])
def test_offload_trains_the_same_bit_by_bit(flags: str, fused: bool) -> None:
    runs = []
    for applied_flags in ("", flags):
        model, optimizer = model_and_optimizer(fused)
        losses = train(model, optimizer, range(3))
        with applied(optimizer, applied_flags, bucket_bytes=2**16):
            losses += train(model, optimizer, range(3, 20))
        losses += train(model, optimizer, range(20, 23))
        runs.append((losses, snapshot(model, optimizer)))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


def test_offloaded_state_is_pinned_and_readable_after_a_step() -> None:
    model, optimizer = model_and_optimizer()
    twin, plain = model_and_optimizer()
    train(twin, plain, range(4))
    with applied(optimizer, "--offload optimizer"):
        train(model, optimizer, range(4))
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            moment = optimizer.state[parameter]["exp_avg"]
            if moment.numel() >= 1024:
                assert moment.is_pinned()
            assert torch.equal(moment.cpu(), plain.state[other]["exp_avg"].cpu())


def test_offload_frees_device_memory_between_steps() -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer, range(2))
    resident = torch.cuda.memory_allocated()
    with applied(optimizer, "--offload optimizer"):
        count = sum(p.numel() for p in model.parameters())
        assert resident - torch.cuda.memory_allocated() >= 0.95 * 8 * count


def test_8_bits_take_a_quarter_and_train_alike() -> None:
    reference, plain = model_and_optimizer()
    expected = train(reference, plain, range(60))
    model, optimizer = model_and_optimizer()
    losses = train(model, optimizer, range(30))
    resident = torch.cuda.memory_allocated()
    with applied(optimizer, "--adam8bit"):
        count = sum(p.numel() for p in model.parameters())
        assert resident - torch.cuda.memory_allocated() >= 5.8 * count
        losses += train(model, optimizer, range(30, 45))
    losses += train(model, optimizer, range(45, 60))
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-3


def test_paged_moments_convert_there_and_back() -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer, range(5))
    before = snapshot(model, optimizer)["state"]
    with applied(optimizer, "--optim paged-adam8bit"):
        paged = [state["state1"] for state in optimizer.state.values() if hasattr(state["state1"], "is_paged")]
        assert paged
    after = snapshot(model, optimizer)["state"]
    for name, state in before.items():
        largest = state["exp_avg"].abs().max().item()
        torch.testing.assert_close(after[name]["exp_avg"], state["exp_avg"], rtol=0.1, atol=1e-2 * largest)
    with applied(optimizer, "--optim paged-adam8bit"):
        assert train(model, optimizer, range(5, 8))


def test_a_fresh_optimizer_can_start_paged() -> None:
    model, optimizer = model_and_optimizer()
    with applied(optimizer, "--optim paged-adam8bit"):
        losses = train(model, optimizer, range(20))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("flags", ["", "--adam8bit", "--offload optimizer", "--adam8bit --offload optimizer"])
def test_a_step_interrupted_anywhere_can_be_completed(flags: str) -> None:
    model = mlp().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    with applied(optimizer, flags) as techniques:
        train(model, optimizer, range(2))
        model(torch.randn(8, 16, device="cuda")).square().mean().backward()
        assert_recovers_anywhere(model, optimizer, techniques)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_is_served(fused: bool) -> None:
    model, optimizer = model_and_optimizer(fused)
    twin = copy.deepcopy(model)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    inputs = torch.randn(64, 16, device="cuda")
    with applied(optimizer, "--adam8bit"):
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    twin(inputs).square().mean().backward()
    plain.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-4


def test_halves_and_rounding_on_the_device() -> None:
    values = torch.randn(1000, 33, device="cuda")
    assert torch.equal(join_master(*split_master(values)), values)
    rounded = round_stochastically(values, torch.Generator("cuda").manual_seed(0))
    assert (rounded.float() - values).abs().max() <= values.abs().max() / 64
