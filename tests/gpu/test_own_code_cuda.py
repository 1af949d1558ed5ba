"""What a loop's own code does with parameters, gradients and moments that rest on the host: as without memlab."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from memlab import Workload, fit
from memlab.techniques.offload import link
from tests.helpers.needs import needs

pytestmark = needs(gpu=1)

Figures = list[Any]
LARGE = 48 * 96  # elements of the weights that rest


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(F.gelu(self.up(self.norm(hidden))))
        return hidden + change


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 48), nn.Linear(48, 4)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        output: torch.Tensor = self.head(hidden)
        return output


class _Run:
    """A training run, and what its own code keeps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = _Net().cuda()
        # a large eps: noise of small gradients is not to be as large as an update
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)
        self.kept: Any = None
        self.step = -1

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def inputs(self) -> torch.Tensor:
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(self.step)).cuda()

    def backward(self, penalty: torch.Tensor | float = 0.0) -> torch.Tensor:
        loss = self.model(self.inputs).square().mean() + penalty
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _total(tensors: Any) -> torch.Tensor:
    total: torch.Tensor = torch.stack([tensor.detach().double().abs().sum().cpu() for tensor in tensors]).sum()
    return total


def _copied(run: _Run) -> Figures:
    twin = copy.deepcopy(run.model)
    loss = run.backward()
    run.update()
    assert {type(p) for p in twin.parameters()} == {nn.Parameter}
    with torch.no_grad():
        return [loss, twin(run.inputs).sum()]


def _averaged(run: _Run) -> Figures:
    run.kept = run.kept or AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loss = run.backward()
    run.update()
    run.kept.update_parameters(run.model)
    with torch.no_grad():
        return [loss, run.kept(run.inputs).sum()]


def _averaged_by_hand(run: _Run) -> Figures:
    run.kept = run.kept or {name: value.clone() for name, value in run.model.state_dict().items()}
    loss = run.backward()
    run.update()
    for name, value in run.model.state_dict().items():
        run.kept[name].mul_(0.9).add_(value, alpha=0.1)
    assert all(value.is_cuda for value in run.kept.values())
    return [loss, _total(run.kept.values())]


def _kept_on_the_host(run: _Run) -> Figures:
    if run.step == 1:
        weights = [value.cpu() for value in run.model.state_dict().values()]
        moments = run.optimizer.state_dict()["state"].values()
        run.kept = weights + [value.cpu() for state in moments for value in state.values()]
    loss = run.backward()
    run.update()
    return [loss, _total(run.kept or [torch.zeros(1)])]


def _held(run: _Run) -> Figures:
    run.kept = run.kept or run.model.state_dict()
    loss = run.backward()
    run.update()
    return [loss, _total(run.kept.values())]


def _moved(run: _Run) -> Figures:
    loss = run.backward()
    run.update()
    run.model.cpu()
    assert {p.device.type for p in run.parameters} == {"cpu"}
    with torch.no_grad():
        output = run.model(run.inputs.cpu()).sum()
    run.model.cuda()
    return [loss, output]


def _written(run: _Run) -> Figures:
    loss = run.backward()
    run.update()
    for parameter in run.parameters:
        parameter.data.add_(torch.ones_like(parameter), alpha=1e-3)
        parameter.data = parameter.data * 0.999
    with torch.no_grad():
        for parameter in run.parameters:
            parameter.mul_(torch.tensor(0.99, device="cuda"))
    return [loss]


def _as_a_vector(run: _Run) -> Figures:
    loss = run.backward()
    run.update()
    vector = nn.utils.parameters_to_vector(run.parameters).detach()
    assert vector.is_cuda
    nn.utils.vector_to_parameters(vector * 0.99, run.parameters)
    return [loss]


def _penalized_after(run: _Run) -> Figures:
    loss = run.model(run.inputs).square().mean()
    weight = run.model.blocks[1].up.weight
    penalty = torch.stack([p.norm() for p in run.parameters]).sum() + (weight.T @ weight - torch.eye(48).cuda()).norm()
    (loss + 1e-2 * penalty).backward()
    run.update()
    return [loss]


def _penalty(run: _Run) -> Any:
    return 1e-2 * sum(p.square().sum() for p in run.parameters)


def _penalized_before(run: _Run) -> Figures:
    loss = run.backward(_penalty(run))
    run.update()
    return [loss]


def _clipped_by_hand(run: _Run) -> Figures:
    loss = run.backward()
    gradients: Any = [p.grad for p in run.parameters]
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, (0.1 / norm).clamp(max=1.0))
    run.update()
    return [loss, norm]


def _clipped_one_by_one(run: _Run) -> Figures:
    loss = run.backward()
    norm = torch.stack([p.grad.norm() for p in run.parameters if p.grad is not None]).norm()
    for parameter in run.parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(0.1 / norm)
        parameter.grad = parameter.grad + 1e-3 * parameter.detach().sign()
    run.update()
    return [loss, norm]


def _clipped(run: _Run) -> Figures:
    loss = run.backward()
    norm = nn.utils.clip_grad_norm_(run.parameters, 0.1, foreach=True)
    run.update()
    return [loss, norm]


def _gradients_held(run: _Run) -> Figures:
    run.backward()
    gradients: Any = [p.grad for p in run.parameters]
    loss = run.backward()  # adds to what is held
    found = _total(gradients)
    for gradient in gradients:
        gradient.mul_(0.5)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=False)
    return [loss, found, _total(gradients)]


def _hooked(run: _Run) -> Figures:
    if run.kept is None:
        run.kept = []
        for parameter in run.parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: run.kept.append((p.grad * p.detach()).sum()))
    loss = run.backward()
    run.update()
    return [loss, sum(run.kept)]


def _used_past_modules(run: _Run) -> Figures:
    loss = run.backward()
    run.update()
    up, hidden = run.model.blocks[0].up, torch.ones(2, 48, device="cuda")
    halved = {name: p.detach() * 0.5 for name, p in run.model.named_parameters()}
    output = torch.func.functional_call(run.model, halved, (run.inputs,))
    return [loss, F.linear(hidden, up.weight, up.bias).sum(), output.sum()]


def _asked_for_gradients(run: _Run) -> Figures:
    run.backward()
    held = [p.data for p in run.parameters]  # so that their graph is that of the GPU
    slopes = torch.autograd.grad(_penalty(run), run.parameters)
    del held
    loss = run.backward()
    run.update()
    return [loss, _total(slopes)]


def _asked_for_the_device(run: _Run) -> Figures:
    loss = run.backward()
    run.update()
    assert {str(p.device) for p in run.parameters} == {"cuda:0"}
    assert all(p.is_cuda and not p.is_cpu and p.get_device() == 0 for p in run.parameters)
    assert all(torch.zeros_like(p).is_cuda and p.new_zeros(1).is_cuda for p in run.parameters)
    return [loss]


def _saved(run: _Run) -> Figures:
    loss = run.backward()
    run.update()
    found = []
    for value in (run.model.state_dict(), run.model):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        found.append(loaded if isinstance(loaded, dict) else loaded.state_dict())
    assert all(value.is_cuda for state in found for value in state.values())
    return [loss, *(_total(state.values()) for state in found)]


def _moments_read(run: _Run) -> Figures:
    loss = run.backward()
    run.update()
    state: Any = run.optimizer.state
    by_name = [(state[p]["exp_avg"] * p.detach()).sum() for p in run.parameters]
    each = [(v * p.detach()).sum() for p in run.parameters for v in state[p].values() if v.dim()]
    saved = run.optimizer.state_dict()["state"]
    in_dict = [(saved[at]["exp_avg"] * p.detach()).sum() for at, p in enumerate(run.parameters)]
    assert all(saved[at]["exp_avg"].device == p.device for at, p in enumerate(run.parameters))
    return [loss, *by_name, *each, *in_dict]


def _moments_written(run: _Run) -> Figures:
    loss = run.backward()
    run.update()
    for parameter in run.parameters:
        state = run.optimizer.state[parameter]
        state["exp_avg"].mul_(torch.tensor(0.5, device="cuda"))
        state["exp_avg_sq"].add_(parameter.detach().square())
    return [loss]


def _moments_copied(run: _Run) -> Figures:
    loss = run.backward()
    run.update()
    if run.step == 1:
        run.kept = copy.deepcopy(run.optimizer.state_dict())
        assert all(v.is_cuda for state in run.kept["state"].values() for v in state.values() if v.dim())
    if run.step == 2:
        run.optimizer.load_state_dict(run.kept)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)["state"].values()
    return [loss, *(_total(state.values()) for state in saved)]


def _moments_written_in_part(run: _Run) -> Figures:
    loss = run.backward()
    run.update()
    saved = run.optimizer.state_dict()
    for at, parameter in enumerate(run.parameters):
        state = saved["state"][at] if run.step % 2 else run.optimizer.state[parameter]
        moment = state["exp_avg"]
        moment[1:3].fill_(1e-3)
        moment.view(2, -1)[0].mul_(0.5)
        moment.data.add_(1e-3)
        for part in moment.split(2):
            part.mul_(0.9)
        torch.atleast_1d([moment])[0].mul_(0.9)
        with torch.inference_mode():
            moment.add_(moment.mean())
        state["exp_avg_sq"].data = state["exp_avg_sq"] * 2
    if run.step % 2:
        run.optimizer.load_state_dict(saved)
    return [loss, *(_total([run.optimizer.state[p]["exp_avg"]]) for p in run.parameters)]


LOOPS: list[Callable[[_Run], Figures]] = [
    _copied,
    _averaged,
    _averaged_by_hand,
    _kept_on_the_host,
    _held,
    _moved,
    _written,
    _as_a_vector,
    _penalized_after,
    _penalized_before,
    _clipped_by_hand,
    _clipped_one_by_one,
    _clipped,
    _gradients_held,
    _hooked,
    _used_past_modules,
    _asked_for_gradients,
    _asked_for_the_device,
    _saved,
]
MOMENTS = [_kept_on_the_host, _moments_read, _moments_written, _moments_written_in_part, _moments_copied]
PLANS = ("--offload params", "--accumulate 2 --checkpoint --offload params,activations")


def _figures(
    loop: Callable[[_Run], Figures], plan: str, *, rescue: bool = False
) -> tuple[list[float], list[torch.Tensor]]:
    run, found = _Run(), []
    with fit(Workload(run.model, run.optimizer), plan, rescue=rescue):
        for run.step in range(4):
            found += [float(figure.detach() if isinstance(figure, torch.Tensor) else figure) for figure in loop(run)]
    assert all(p.is_cuda and type(p) is nn.Parameter for p in run.parameters)
    return found, [p.detach() for p in run.parameters]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loop", LOOPS)
def test_it_finds_what_it_would_without(loop: Callable[[_Run], Figures], plan: str) -> None:
    _compare(loop, plan, rescue="accumulate" not in plan)


@pytest.mark.parametrize("loop", [_averaged_by_hand, _kept_on_the_host, _moved, _penalized_before])
def test_weights_in_pure_bf16_are_found_on_the_gpu(loop: Callable[[_Run], Figures]) -> None:
    # moments are rounded at random
    _compare(loop, "--precision pure-bf16 --offload params", "--precision pure-bf16", tolerance=0.05)


@pytest.mark.parametrize("updated", [1e9, 1e12], ids=["streamed", "on the host"])
@pytest.mark.parametrize("plan", ["--offload optimizer", "--offload params,optimizer"])
@pytest.mark.parametrize("loop", MOMENTS)
def test_it_finds_its_moments(
    loop: Callable[[_Run], Figures], plan: str, updated: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # where state is updated follows from the time that copies take
    monkeypatch.setattr(link, "measured", lambda _device: link.Link(down=4e11, up=4e11, both=4e11, updated=updated))
    _compare(loop, plan)


def _compare(
    loop: Callable[[_Run], Figures], plan: str, other: str = "", *, rescue: bool = False, tolerance: float = 1e-4
) -> None:
    found, weights = _figures(loop, plan, rescue=rescue)
    expected, expected_weights = _figures(loop, other)
    assert found == pytest.approx(expected, rel=tolerance, abs=tolerance / 10)
    for one, other in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance / 10)


def _large_on_the_device(model: nn.Module) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        weights = [p for p in model.parameters() if p.numel() >= LARGE]
        return sum(p.is_cuda + (p.grad is not None and p.grad.is_cuda) for p in weights)


def test_what_the_loop_has_looked_at_rests_again() -> None:
    run = _Run()
    run.step = 0
    with fit(Workload(run.model, run.optimizer), "--offload params"):
        run.backward()
        assert _large_on_the_device(run.model) == 0
        for parameter in run.parameters:
            assert parameter.grad is not None
            parameter.data.add_(1e-3 * parameter.grad)
            assert _large_on_the_device(run.model) <= 4
        held = [p.data for p in run.parameters], [p.grad for p in run.parameters]
        assert _large_on_the_device(run.model) == 12
        run.model(run.inputs)
        assert _large_on_the_device(run.model) == 12
        del held
        run.model(run.inputs)
        assert _large_on_the_device(run.model) == 0
        run.model.cpu()
        run.model.cuda()
        run.model(run.inputs)
        assert _large_on_the_device(run.model) == 0


def test_a_backward_pass_that_breaks_off_leaves_the_gradient_that_was_there() -> None:
    run = _Run()
    run.step = 0

    def broken(_gradient: torch.Tensor) -> None:
        raise ValueError("broken off")

    with fit(Workload(run.model, run.optimizer), "--offload params"):
        run.backward()
        weight = run.model.blocks[2].down.weight
        before = weight.grad.clone()
        hook = weight.register_hook(broken)
        with pytest.raises(ValueError, match="broken off"):
            run.backward()
        hook.remove()
        with torch.no_grad():
            run.model(run.inputs)
        assert torch.equal(weight.grad, before)


def test_without_room_on_the_device_it_is_used_where_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run()
    run.step = 0

    def no_room(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with fit(Workload(run.model, run.optimizer), "--offload params,optimizer"):
        run.backward()
        run.optimizer.step()
        before = _total(run.parameters)
        with monkeypatch.context() as patched:
            patched.setattr("memlab.techniques.offload.block_streaming.ParameterCopies.fetch", no_room)
            patched.setattr("memlab.techniques.offload.optimizer_state._fetched", no_room)
            assert _total(run.model.state_dict().values()) == before
            assert all(p.grad is not None and p.grad.norm() > 0 for p in run.parameters)
            assert all(run.optimizer.state[p]["exp_avg"].norm() > 0 for p in run.parameters)


def test_what_the_loop_holds_when_the_plan_ends_stays_the_parameter() -> None:
    run = _Run()
    run.step = 0
    with fit(Workload(run.model, run.optimizer), "--offload params"):
        run.backward()
        held = run.model.state_dict()
    assert all(p.is_cuda and p.grad is not None and p.grad.is_cuda for p in run.parameters)
    run.update()
    assert all(torch.equal(held[name], p.detach()) for name, p in run.model.named_parameters())
