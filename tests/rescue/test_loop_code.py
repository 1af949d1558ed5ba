"""The loop's own code between model call and optimizer step: watched without being changed, repeated where it can be."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from memlab import Workload, fit
from memlab.rescue.loop_code import LoopCode, _Held
from memlab.session import Session, train_together
from tests.loops.cases import Tower, pairs
from tests.rescue.faults import Faults, Noted

Optimizer = torch.optim.Optimizer


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Tower().double()


@pytest.fixture
def optimizer(model: nn.Module) -> Optimizer:
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # with its state: torch 2.11 makes it on the default device, which tests change
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    made.zero_grad()
    return made


@pytest.fixture
def session(model: nn.Module, optimizer: Optimizer) -> Iterator[Session]:
    with fit(Workload(model, optimizer), rescue=True) as session:
        yield session


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = pairs(0)
    return inputs.double(), targets


def stack() -> list[str]:
    return [type(mode).__name__ for mode in _get_current_function_mode_stack()]


class Counting(TorchFunctionMode):
    """A mode of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


# -- where it stands ---------------------------------------------------------------------------


def test_it_watches_from_the_model_call_to_the_step(session: Session, model: nn.Module, optimizer: Optimizer) -> None:
    assert stack() == []
    inputs, targets = batch()
    loss = F.cross_entropy(model(inputs), targets)
    assert stack() == ["LoopCode"]
    loss.backward()
    assert stack() == ["LoopCode"]
    optimizer.step()
    assert stack() == []


def test_evaluation_does_not_begin_it(session: Session, model: nn.Module) -> None:
    with torch.no_grad():
        model(batch()[0])
    model.eval()
    model(batch()[0])
    assert stack() == []


def test_it_ends_with_the_session(model: nn.Module, optimizer: Optimizer) -> None:
    with fit(Workload(model, optimizer), rescue=True):
        model(batch()[0])
        assert stack() == ["LoopCode"]
    assert stack() == []


@pytest.mark.parametrize("where", ["own code", "model"])
def test_it_ends_with_a_session_that_an_error_ends(where: str, model: nn.Module, optimizer: Optimizer) -> None:
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        with fit(Workload(model, optimizer), rescue=True):
            model(batch()[0])
            if where == "model":
                model(torch.ones(3, 3))
            _ = 1 / 0
    assert stack() == []


def test_one_for_two_sessions_each(model: nn.Module, optimizer: Optimizer) -> None:
    other = Tower().double()
    other_optimizer = torch.optim.AdamW(other.parameters())
    inputs, targets = batch()
    with fit(Workload(model, optimizer), rescue=True), fit(Workload(other, other_optimizer), rescue=True):
        for _ in range(2):
            loss = F.cross_entropy(model(inputs) + other(inputs), targets)
            assert stack() == ["LoopCode", "LoopCode"]
            loss.backward()
            optimizer.step()
            assert stack() == ["LoopCode"]
            other_optimizer.step()
            assert stack() == []


# -- modes of the user's -----------------------------------------------------------------------


def test_a_device_entered_before_and_left_inside(session: Session, model: nn.Module, optimizer: Optimizer) -> None:
    with torch.device("meta"):
        with torch.device("cpu"):
            inputs, targets = batch()
            loss = F.cross_entropy(model(inputs), targets)
            assert torch.ones(1).device.type == "cpu"
        assert torch.ones(1).device.type == "meta"
    assert torch.ones(1).device.type == "cpu"
    loss.backward()
    optimizer.step()
    assert stack() == []


def test_a_device_entered_inside_and_left_after_the_step(
    session: Session, model: nn.Module, optimizer: Optimizer
) -> None:
    inputs, targets = batch()
    loss = F.cross_entropy(model(inputs), targets)
    with torch.device("meta"):
        assert torch.ones(1).device.type == "meta"
        loss.backward()
        optimizer.step()
        assert torch.ones(1).device.type == "meta"
    assert torch.ones(1).device.type == "cpu"
    assert stack() == []


def test_the_default_device_stays(session: Session, model: nn.Module, optimizer: Optimizer) -> None:
    inputs, targets = batch()
    torch.set_default_device("meta")
    try:
        loss = F.cross_entropy(model(inputs), targets)
        assert torch.ones(1).device.type == "meta"
        loss.backward()
        optimizer.step()
        assert torch.ones(1).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert stack() == []


def test_the_default_device_changed_inside(session: Session, model: nn.Module, optimizer: Optimizer) -> None:
    inputs, targets = batch()
    loss = F.cross_entropy(model(inputs), targets)
    torch.set_default_device("meta")
    try:
        assert torch.ones(1).device.type == "meta"
        loss.backward()
        optimizer.step()
    finally:
        torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu"
    assert stack() == []


def test_a_mode_entered_before_and_left_inside(session: Session, model: nn.Module, optimizer: Optimizer) -> None:
    inputs, targets = batch()
    with Counting() as counting:
        loss = F.cross_entropy(model(inputs), targets)
        assert counting.calls
        assert stack()[-1] == "Counting"
    before = counting.calls
    loss.backward()
    optimizer.step()
    assert counting.calls == before
    assert stack() == []


def test_a_mode_entered_inside_and_left_after_the_step(
    session: Session, model: nn.Module, optimizer: Optimizer
) -> None:
    inputs, targets = batch()
    logits = model(inputs)
    with Counting() as counting:
        F.cross_entropy(logits, targets).backward()
        optimizer.step()
        assert stack() == ["Counting"]
        before = counting.calls
        torch.ones(1)
        assert counting.calls > before
    assert stack() == []


def test_a_device_around_all_of_it(model: nn.Module, optimizer: Optimizer) -> None:
    inputs, targets = batch()
    with torch.device("meta"):
        with fit(Workload(model, optimizer), rescue=True):
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            assert stack() == ["DeviceContext"]
        assert torch.ones(1).device.type == "meta"
    assert stack() == []


# -- functions ---------------------------------------------------------------------------------


class Freeing:
    """An owner that has room again whenever it is asked."""

    def __init__(self) -> None:
        self.recovery = self.calls = self
        self.attempts: list[int] = []
        self.ended = 0

    is_in_other_call = False

    def can_rescue(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError)

    def makes_room_for_loop(self, error: BaseException, attempt: int) -> None:
        assert attempt < 5
        self.attempts.append(attempt)

    def backward_runs_again(self) -> None:
        pass

    def backward_ended(self) -> None:
        self.ended += 1


@pytest.fixture
def owner() -> Freeing:
    return Freeing()


@pytest.fixture
def loop_code(owner: Freeing) -> Iterator[LoopCode]:
    watching = LoopCode(owner)
    watching.begin()
    yield watching
    watching.end()


def test_a_function_that_ran_out_is_called_again(loop_code: LoopCode, owner: Freeing) -> None:
    with Faults([1, 2]):
        found = torch.full((3,), 2.0) * 3
    assert found.tolist() == [6.0, 6.0, 6.0]
    assert owner.attempts == [1, 2]


def test_another_error_is_not_retried(loop_code: LoopCode, owner: Freeing) -> None:
    with pytest.raises(RuntimeError, match="must match"):
        _ = torch.ones(2) + torch.ones(3)
    assert owner.attempts == []


class _FailingAfterWriting(Faults):
    """Memory runs out in a function that has written its result already."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "mul_" in str(func):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return out


def test_functions_that_write_into_lists_are_not_called_again(loop_code: LoopCode, owner: Freeing) -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    with pytest.raises(torch.OutOfMemoryError), _FailingAfterWriting():
        torch._foreach_mul_(tensors, 2.0)
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0, 2.0]] * 2
    assert owner.attempts == []


@pytest.mark.parametrize("write", ["clamp", "norm"])
def test_helpers_that_write_gradients_write_them_once(write: str, loop_code: LoopCode, owner: Freeing) -> None:
    """Functions such as `clip_grad_norm_` are Python around several of torch's: each is retried by itself."""
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(3)]

    def clip() -> list[list[float]]:
        for parameter in parameters:
            parameter.grad = torch.full((4,), 3.0)
        if write == "norm":
            nn.utils.clip_grad_norm_(parameters, 1.0)
        else:
            nn.utils.clip_grad_value_(parameters, 1.0)
        return [p.grad.tolist() for p in parameters if p.grad is not None]

    with Faults() as count:
        expected = clip()
    for nth in range(4, count.count + 1):
        with Faults([nth]) as faults:
            assert clip() == expected
        assert faults.failed
    assert len(owner.attempts) == max(0, count.count - 3)


def test_random_numbers_are_drawn_once(loop_code: LoopCode, owner: Freeing) -> None:
    inputs = torch.ones(64, requires_grad=True)
    torch.manual_seed(3)
    with Faults() as count:
        expected, following = F.dropout(inputs, 0.5), torch.rand(2)
    for nth in range(1, count.count + 1):
        torch.manual_seed(3)
        with Faults([nth]):
            found, after = F.dropout(inputs, 0.5), torch.rand(2)
        assert torch.equal(found, expected)
        assert torch.equal(after, following)
    assert len(owner.attempts) == count.count


def test_what_is_saved_is_let_go_of_with_the_graph(loop_code: LoopCode, owner: Freeing) -> None:
    leaf = torch.randn(100, requires_grad=True)
    hidden = leaf * 2
    squared = hidden * hidden
    seen = weakref.ref(squared)
    softened = F.softmax(squared.exp(), 0)
    del hidden, squared, softened
    gc.collect()
    assert seen() is None
    assert not any(isinstance(kept, _Held) for kept in gc.get_objects())


def test_saved_tensors_are_freed_by_backward(loop_code: LoopCode, owner: Freeing) -> None:
    leaf = torch.randn(100, requires_grad=True)
    loss = (leaf.exp() * 2).log().sum()
    loss.backward()
    assert owner.ended == 1
    assert [held.tensor for held in gc.get_objects() if isinstance(held, _Held) and held.tensor is not None] == []
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_tensor_changed_in_place_is_found(loop_code: LoopCode) -> None:
    leaf = torch.randn(100, requires_grad=True)
    hidden = leaf.exp()
    loss = (hidden * hidden).sum()
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


# -- the loop's part of the backward pass ------------------------------------------------------


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _two_calls(model: nn.Module) -> torch.Tensor:
    inputs, targets = batch()
    left = F.normalize(model(inputs), dim=1)
    right = F.normalize(model(inputs.roll(1, 1)), dim=1)
    return F.cross_entropy(left @ right.t(), torch.arange(len(left))) + F.cross_entropy(right, targets)


def _penalty(model: nn.Module) -> torch.Tensor:
    inputs, targets = batch()
    return F.cross_entropy(model(inputs), targets) + 1e-2 * sum(p.square().sum() for p in model.parameters())


def _plain(model: nn.Module) -> torch.Tensor:
    inputs, targets = batch()
    return F.cross_entropy(model(inputs) * 2.0, targets)


@pytest.mark.few(2)
@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("loss_of", [_plain, _two_calls, _penalty])
@pytest.mark.parametrize("way", ["method", "function", "kept", "grad"])
def test_a_backward_pass_that_ran_out_anywhere(way: str, loss_of: Any, has_gradients: bool) -> None:
    """At every allocation of it; gradients that were there before are added to, once."""

    def run(faults: Faults, rescued: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Tower().double()
        optimizer = torch.optim.AdamW(model.parameters())
        if has_gradients:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        with fit(Workload(model, optimizer), rescue=rescued):
            loss = loss_of(model)
            with faults:
                if way == "method":
                    loss.backward()
                elif way == "function":
                    torch.autograd.backward(loss)
                elif way == "kept":
                    loss.backward(retain_graph=True)
                else:
                    return list(torch.autograd.grad(loss, list(model.parameters())))
            return _gradients(model)

    expected = run(Faults(), rescued=False)
    count = Faults()
    run(count, rescued=True)
    for nth in range(1, count.count + 1, 3):
        faults = Faults([nth])
        found = run(faults, rescued=True)
        assert faults.failed
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert stack() == []


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["a hook", "a function", "a module's hook"])
def test_code_in_the_loops_part_leaves_what_one_pass_leaves(way: str) -> None:
    def run(faults: Faults, rescued: bool) -> tuple[list[float], int]:
        torch.manual_seed(0)
        Noted.seen.clear()
        model, doubled = Tower().double(), nn.Identity()
        rescues = 0
        with fit(Workload(model, torch.optim.AdamW(model.parameters())), rescue=rescued) as session:
            inputs, targets = batch()
            logits = model(inputs) * 2.0
            if way == "a hook":
                logits.register_hook(hook=lambda gradient: Noted.seen.append(float(gradient.norm())))
            elif way == "a function":
                logits = Noted.apply(logits)  # type: ignore[no-untyped-call]
            else:
                doubled.register_full_backward_hook(lambda _m, _i, outputs: Noted.seen.append(float(outputs[0].norm())))
                logits = doubled(logits)
            # that comes first, and what else the loop computes can run out after it
            loss = F.cross_entropy(logits, targets) + sum((p.exp() * p).sum() for p in model.parameters())
            with faults, suppress(torch.OutOfMemoryError):
                loss.backward()
            rescues = len(session.rescuer.rescues) if session.rescuer is not None else 0
        return [*Noted.seen], rescues

    expected, _ = run(Faults(), rescued=False)
    count = Faults()
    run(count, rescued=True)
    found = [run(Faults([nth]), rescued=True) for nth in range(1, count.count + 1)]
    assert any(rescues for _, rescues in found)
    assert [seen for seen, rescues in found if rescues and seen != pytest.approx(expected, rel=1e-9)] == []


@pytest.mark.parametrize(
    "plan", ["--precision pure-bf16", "--adam8bit --offload optimizer", "--accumulate 2 --checkpoint"]
)
def test_the_loop_reads_what_it_would_without_a_rescue(plan: str) -> None:
    """Values that memlab keeps in another form are the loop's when torch's functions pass through the mode."""

    def read(*, rescued: bool) -> list[Any]:
        torch.manual_seed(0)
        model = Tower()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found: list[Any] = []
        with fit(Workload(model, optimizer), plan, rescue=rescued):
            for step in range(2):
                inputs, targets = pairs(step)
                penalty = sum(p.square().sum() for p in model.parameters())
                (F.cross_entropy(model(inputs), targets) + 1e-3 * penalty).backward()
                found += [p.detach().double().sum().item() for p in model.parameters()]
                found += [p.data.dtype for p in model.parameters()]
                found += [each.item() for each in torch._foreach_norm([p.grad for p in model.parameters()])]
                found.append(torch.stack([p.norm().detach() for p in model.parameters()]).norm().item())
                optimizer.step()
                optimizer.zero_grad()
        return found

    assert read(rescued=True) == read(rescued=False)


# -- other models ------------------------------------------------------------------------------


def test_what_another_model_computes_in_its_call_is_its_own_to_rescue() -> None:
    """An encoder and a decoder, as of a translator: the graph of the one waits while the other is called."""

    def trained(*, guarded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        models = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        workloads = [Workload(each.double(), torch.optim.SGD(each.parameters(), lr=0.1)) for each in models]
        rows = torch.randn(8, 6).double()
        with ExitStack() as sessions:
            if guarded:
                opened = [sessions.enter_context(fit(each, rescue=True)) for each in workloads]
                train_together(opened)
            for _ in range(3):
                found = models[0](rows)
                with Faults([2]) if guarded else nullcontext():
                    out = models[1](found)
                out.square().mean().backward()
                for each in workloads:
                    each.optimizers[0].step()
                    each.optimizers[0].zero_grad()
            if guarded:
                first, second = (each.rescuer.rescues for each in opened if each.rescuer is not None)
                assert first == []
                assert {each.place for each in second} == {"the forward pass"}
        return [each.detach() for model in models for each in (*model.parameters(), *model.buffers())]

    pairs_of = zip(trained(guarded=True), trained(guarded=False), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in pairs_of)
