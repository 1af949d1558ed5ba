"""Copies beside the computation: nobody reads what has not arrived, nor gives memory back that is still read.

There is no GPU here. The techniques run on streams that copy as late or as early as streams may, fill what is not written
yet with rubbish, and fail when memory of a copy under way is gone. Numbers that are right under all of that are right
under any timing.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memlab.plan import Plan
from memlab.runtime.mechanisms import Updating
from memlab.runtime.workload import Workload
from memlab.techniques.base import Technique
from memlab.techniques.offload import activations, host_update, optimizer_state
from memlab.techniques.offload.activations import OffloadActivations
from memlab.techniques.offload.optimizer_state import OffloadOptimizer
from memlab.techniques.offload.spill import is_spilled
from memlab.techniques.offload.transfers import CopyStreams, Leaving
from tests.driving import (
    FailingAt,
    FailingToAllocateAt,
    applied,
    assert_recovers_anywhere,
    loss_of,
    mlp,
    same,
    snapshot,
    train,
)
from tests.techniques.copy_streams import LateCopyStreams

Luck = random.Random
_LUCK = st.randoms(use_true_random=False)


@contextmanager
def copy_streams_are(streams: CopyStreams) -> Iterator[None]:
    """Techniques copy in these."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (activations, optimizer_state, host_update):
            patch.setattr(module, "copy_streams_of", lambda _tensor: streams)
            patch.setattr(module, "copy_streams_for", lambda _tensor, _device: streams, raising=False)
            if hasattr(module, "settle"):
                patch.setattr(module, "settle", streams.settle)
        yield


# -- activations -----------------------------------------------------------------------------------


class Net(nn.Module):
    """Saves tensors of many sizes, some of them several times, and one that a checkpoint recomputes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Linear(32, 256), nn.Linear(256, 32)
        self.heads = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norm = nn.LayerNorm(32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(inputs)
        query, key, value = (head(hidden) for head in self.heads)  # one tensor, saved three times
        hidden = hidden + nn.functional.dropout((query @ key.t()).softmax(-1) @ value, 0.2, training=True)
        hidden = hidden + self.narrow(nn.functional.gelu(self.wide(hidden)))
        return torch.utils.checkpoint.checkpoint(self.wide, hidden, use_reentrant=False).square().mean()


def streamed(model: nn.Module, streams: CopyStreams) -> Callable[..., torch.Tensor]:
    """The model under a technique that believes to be beside a GPU."""
    technique = OffloadActivations(Plan.parse("--offload activations:disk"))
    from contextlib import ExitStack

    technique.attach_model(Workload(model, torch.optim.SGD(model.parameters())), ExitStack())
    technique._reads_in_place = False
    call = lambda *args: technique.forward(model, args, {})  # noqa: E731 - carries an attribute
    call.technique = technique  # type: ignore[attr-defined]
    return call


def inputs_of(step: int) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step))


def gradients_after(
    model: nn.Module, call: Callable[..., torch.Tensor], order: list[int], *, twice: bool
) -> list[torch.Tensor]:
    """Forward passes one after the other, then their backward passes in some order."""
    torch.manual_seed(1)
    losses = {step: call(inputs_of(step)) for step in range(3)}
    for step in order:
        loss = losses.pop(step)
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
        del loss
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.full
@given(luck=_LUCK, order=st.permutations([0, 1, 2]), left_out=st.integers(0, 2), twice=st.booleans())
@settings(deadline=None, max_examples=12)
def test_activations_arrive_before_they_are_read(luck: Luck, order: list[int], left_out: int, twice: bool) -> None:
    model, streams = Net(), LateCopyStreams(luck)
    order = order[: 3 - left_out]  # some graphs are never run backward
    expected = gradients_after(model, model, order, twice=twice)
    with copy_streams_are(streams):
        call = streamed(model, streams)
        found = gradients_after(model, call, order, twice=twice)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        gc.collect()
        assert call.technique.spill.stored_bytes == 0  # type: ignore[attr-defined]
        streams.settle()


def test_parts_of_a_batch_are_taken_back_as_what_they_are() -> None:
    """What is saved may be the second half of a storage, and may not have left when backward asks for it."""
    model, streams = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1)), LateCopyStreams(random.Random(0))
    half = torch.randn(64, 32)[48:]

    def gradients(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        call(half).square().mean().backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return found

    expected = gradients(model)
    with copy_streams_are(streams):
        found = gradients(streamed(model, streams))
        streams.settle()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_failed_forward_gives_everything_back() -> None:
    streams = LateCopyStreams(random.Random(0))
    model = Net()
    model.narrow.forward = lambda hidden: 1 / 0  # type: ignore[method-assign]
    with copy_streams_are(streams):
        call = streamed(model, streams)
        with pytest.raises(ZeroDivisionError):
            call(inputs_of(0))
        gc.collect()
        assert call.technique.spill.stored_bytes == 0  # type: ignore[attr-defined]
        streams.settle()


def test_what_is_read_next_is_on_its_way_before_it_is_asked_for() -> None:
    streams, model = LateCopyStreams(random.Random(0)), nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    read: list[tuple[int, int]] = []
    with copy_streams_are(streams):
        call = streamed(model, streams)
        loss = call(torch.randn(64, 64, requires_grad=True)).square().sum()
        for layer in model:
            layer.weight.register_hook(
                lambda _g: read.append((streams.log.count("ask in"), streams.log.count("run in")))
            )
        loss.backward()
    # while the n-th is read, those after it have been asked for
    assert all(asked > number for number, (asked, _) in enumerate(read[:3]))
    assert streams.most_under_way > 1


def test_memory_in_flight_is_bounded_by_twice_the_largest_tensor() -> None:
    held: list[int] = []

    class Watching(CopyStreams):
        def send(self, target: torch.Tensor, source: torch.Tensor, *, reused: bool = False) -> Any:
            ticket = super().send(target, source)
            held.append(
                sum(
                    passage._leaving.held_bytes
                    for passage in gc.get_objects()
                    if type(passage).__name__ == "_CopiedPassage"
                )
            )
            return ticket

    model, streams = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))), Watching()
    with copy_streams_are(streams):
        streamed(model, streams)(torch.randn(32, 64, requires_grad=True)).sum().backward()
    assert 0 < max(held) <= 2 * 32 * 64 * 4


# -- optimizer state -------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True, weight_decay=0.1, maximize=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def beside_a_gpu() -> OffloadOptimizer:
    """The technique as it works beside a GPU, with files for pinned memory."""
    technique = OffloadOptimizer(Plan.parse("--offload optimizer:disk"))
    technique._is_for_gpu = True
    return technique


@given(luck=_LUCK, name=st.sampled_from(sorted(OPTIMIZERS)), bucket_bytes=st.sampled_from([1, 2**14, 2**16, 2**20]))
@settings(deadline=None, max_examples=15)
def test_state_is_streamed_bit_by_bit(luck: Luck, name: str, bucket_bytes: int) -> None:
    runs = []
    for streams in (None, LateCopyStreams(luck)):
        model = mlp()
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        if streams is None:
            losses = train(model, optimizer, range(6))
        else:
            with copy_streams_are(streams):
                losses = train(model, optimizer, range(2))
                with applied(optimizer, [beside_a_gpu()], bucket_bytes):
                    losses += train(model, optimizer, range(2, 5))
                losses += train(model, optimizer, range(5, 6))
                streams.settle()
        runs.append((losses, snapshot(model, optimizer)))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


def test_one_bucket_arrives_and_one_leaves_while_one_is_updated() -> None:
    model, streams = mlp(), LateCopyStreams(random.Random(1))
    streams._luck.random = lambda: 1.0  # type: ignore[method-assign] # only when it must
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    updated: list[tuple[int, int]] = []

    class Watching(OffloadOptimizer):
        def around_update(self, optimizer: Any, parameters: Any) -> Any:
            updated.append((len(streams._streams["in"]), len(streams._streams["out"])))
            return super().around_update(optimizer, parameters)

    technique = Watching(Plan.parse("--offload optimizer:disk"))
    technique._is_for_gpu = True
    with copy_streams_are(streams), applied(optimizer, [technique], 1):
        train(model, optimizer, range(2))
        updated.clear()
        train(model, optimizer, range(2, 3))
    large = [p for p in model.parameters() if p.numel() >= 1024]
    assert len(large) == 2  # each of them with two moments
    assert any(arriving for arriving, _ in updated)
    assert any(leaving for _, leaving in updated)
    assert max(arriving for arriving, _ in updated) <= 2 * 2


def test_nothing_stays_on_the_device_between_steps() -> None:
    model, technique = mlp(), beside_a_gpu()
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    streams = LateCopyStreams(random.Random(2))
    with copy_streams_are(streams), applied(optimizer, [technique], 2**14):
        train(model, optimizer, range(3))
        assert not technique._arriving
        assert not technique._leaving
        # no more is under way than what nobody waits for: the last copies out were waited for by the computation
        assert not streams._streams["in"]
        assert not streams._streams["out"]


@pytest.mark.parametrize("on_host", [False, True])
def test_a_streamed_step_interrupted_anywhere_can_be_completed(on_host: bool) -> None:
    model, technique = mlp(width=48), beside_a_gpu()
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    with applied(optimizer, [technique]):
        if on_host:
            technique.update_on_host(optimizer)
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        # the host's update writes nothing before it has all the memory it needs
        assert_recovers_anywhere(model, optimizer, [technique], FailingToAllocateAt if on_host else FailingAt)


# -- on the host -----------------------------------------------------------------------------------


@given(luck=_LUCK, name=st.sampled_from(["adamw", "fused", "amsgrad"]), seen=st.integers(0, 2))
@settings(deadline=None, max_examples=12)
def test_the_host_updates_within_its_tolerance(luck: Luck, name: str, seen: int) -> None:
    runs = []
    for streams in (None, LateCopyStreams(luck)):
        model = mlp()
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        if streams is None:
            losses = train(model, optimizer, range(8))
        else:
            technique = beside_a_gpu()
            technique.update_on_host(optimizer)
            with copy_streams_are(streams):
                losses = train(model, optimizer, range(seen))
                with applied(optimizer, [technique], 2**14):
                    technique.update_on_host(optimizer)
                    losses += train(model, optimizer, range(seen, 7))
                losses += train(model, optimizer, range(7, 8))
                streams.settle()
        runs.append((losses, [p.detach().clone() for p in model.parameters()], snapshot(model, optimizer)["state"]))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-6, atol=0)
    for one, other in zip(runs[0][1], runs[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    for parameter, state in runs[0][2].items():
        assert float(state["step"]) == float(runs[1][2][parameter]["step"]) == 8


def test_the_host_sees_parameters_and_counters_that_others_write() -> None:
    """There is no copy of either that could fall behind."""
    runs = []
    for on_host in (False, True):
        model = mlp()
        optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
        technique = beside_a_gpu()
        if on_host:
            technique.update_on_host(optimizer)
        with applied(optimizer, [technique] if on_host else []):
            losses = train(model, optimizer, range(2))
            for parameter in model.parameters():
                parameter.data.clamp_(-0.01, 0.01)
                optimizer.state[parameter]["step"].fill_(50.0)
            losses += train(model, optimizer, range(2, 5))
        runs.append(losses)
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)


@pytest.mark.parametrize("seen", [0, 2])
def test_small_parameters_are_updated_where_their_state_stays(seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their moments never leave the device, and one call of the host's kernel takes tensors of one device only."""
    sizes: list[int] = []
    kernel = torch._fused_adamw_

    def recorded(changes: list[torch.Tensor], *args: Any, **options: Any) -> None:
        sizes.extend(change.numel() for change in changes)
        kernel(changes, *args, **options)

    model = mlp()
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    train(model, optimizer, range(seen))
    technique = beside_a_gpu()
    with applied(optimizer, [technique]):
        technique.update_on_host(optimizer)
        monkeypatch.setattr(torch, "_fused_adamw_", recorded)
        train(model, optimizer, range(seen, seen + 2))
        for parameter in model.parameters():
            moment = optimizer.state[parameter]["exp_avg"]
            assert is_spilled(moment.untyped_storage()) == (parameter.numel() >= 1024)
    assert {p.numel() for p in model.parameters() if p.numel() < 1024}
    assert sizes
    assert min(sizes) >= 1024


def test_the_host_leaves_to_others_what_is_theirs() -> None:
    """A plan may change while this technique stays: 8-bit moments, or weights that are kept in bf16."""
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    technique = beside_a_gpu()
    technique.update_on_host(optimizer)
    assert technique.stepper(optimizer) is not None

    class Other(Technique, Updating):
        def stepper(self, optimizer: Any) -> Any:
            return lambda parameters: None

    technique.host.techniques = lambda: [Other(Plan()), technique]
    assert technique.stepper(optimizer) is None
    technique.host.techniques = lambda: [technique]
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert technique.stepper(optimizer) is None


def test_leaving_holds_what_is_on_its_way() -> None:
    streams = LateCopyStreams(random.Random(0))
    streams._luck.random = lambda: 1.0  # type: ignore[method-assign]
    leaving, target = Leaving(), torch.zeros(4)
    leaving.add(streams.send(target, torch.ones(4)))
    assert leaving.holds(target)
    leaving.retire(16)
    assert leaving.holds(target)
    source = leaving.take_back(target)
    assert source is not None
    assert source.sum() == target.sum() == 4
    assert not leaving.holds(target)
    assert leaving.held_bytes == 0
