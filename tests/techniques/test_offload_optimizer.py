"""Optimizer state in files beside the CPU: the same training bit by bit, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch

from memlab import Workload, fit
from memlab.errors import RefusalError
from memlab.plan import Plan, Tier
from memlab.techniques.offload.optimizer_state import OffloadOptimizer
from memlab.techniques.offload.spill import is_spilled
from tests.driving import (
    applied,
    assert_recovers_anywhere,
    loss_of,
    mlp,
    same,
    snapshot,
    state_bytes,
    techniques_of,
    tiny_gpt2,
    train,
)

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4),
}


def spilled(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [v for v in values if isinstance(v, torch.Tensor) and is_spilled(v.untyped_storage())]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("seen", [0, 3])
def test_training_is_the_same_bit_by_bit(name: str, seen: int) -> None:
    runs = []
    for flags in ("", "--offload optimizer"):
        model = mlp()
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        losses = train(model, optimizer, range(seen))
        with applied(optimizer, flags, bucket_bytes=2**14):
            losses += train(model, optimizer, range(seen, 20))
            assert bool(spilled(optimizer)) == bool(flags)
        losses += train(model, optimizer, range(20, 23))
        runs.append((losses, snapshot(model, optimizer)))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


def test_gpt2_trains_the_same_bit_by_bit() -> None:
    runs = []
    for flags in ("", "--offload optimizer"):
        model = tiny_gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with applied(optimizer, flags):
            runs.append(train(model, optimizer, range(20)))
    assert runs[0] == runs[1]


class Codes(torch.Tensor):
    """Values in steps of a scale, as low-bit optimizers keep their moments: it consists of codes and the scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def values(self) -> torch.Tensor:
        return self.codes.float() * self.scale

    def keep(self, values: torch.Tensor) -> None:
        self.scale.copy_(values.abs().max() / 127)
        self.codes.copy_((values / self.scale.clamp(min=1e-30)).round())

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], *_: Any) -> Self:
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            return cls(args[0].codes.clone(), args[0].scale.clone())
        raise NotImplementedError(f"{func} of Codes")


class Marked(torch.Tensor):
    """A tensor of a class that says nothing about what it does."""


class LowBit(torch.optim.Optimizer):
    """SGD with momentum in a class of tensors of its own."""

    def __init__(self, parameters: list[torch.nn.Parameter], kind: type[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    zeros = torch.zeros_like(parameter)
                    is_codes = self.kind is Codes
                    state["kept"] = (
                        Codes(zeros.to(torch.int8), torch.zeros(())) if is_codes else zeros.as_subclass(Marked)
                    )
                kept = state["kept"]
                assert type(kept) is self.kind
                values = 0.9 * (kept.values() if isinstance(kept, Codes) else kept.as_subclass(torch.Tensor))
                values += parameter.grad
                kept.keep(values) if isinstance(kept, Codes) else kept.copy_(values)
                parameter -= group["lr"] * values


@pytest.mark.parametrize("kind", [Codes, Marked])
@pytest.mark.parametrize("seen", [0, 3])
def test_tensors_of_classes_of_their_own_stay_what_they_are(kind: type[torch.Tensor], seen: int) -> None:
    def parts(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        kept = [state["kept"] for state in optimizer.state.values()]
        assert all(type(each) is kind for each in kept)
        return [part for each in kept for part in ((each.codes, each.scale) if isinstance(each, Codes) else (each,))]

    runs = []
    for flags in ("", "--offload optimizer"):
        model = mlp()
        optimizer = LowBit(list(model.parameters()), kind)
        losses = train(model, optimizer, range(seen))
        with applied(optimizer, flags) as techniques:
            losses += train(model, optimizer, range(seen, 8))
            codes = [each for each in parts(optimizer) if each.numel() >= 1024]
            assert codes
            assert all(is_spilled(each.untyped_storage()) == (bool(flags) and kind is Codes) for each in codes)
            notes = [note for technique in techniques for note in technique.notes]
        losses += train(model, optimizer, range(8, 10))
        runs.append(
            (losses, [p.detach().clone() for p in model.parameters()], [each.clone() for each in parts(optimizer)])
        )
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(one, other) for at in (1, 2) for one, other in zip(runs[0][at], runs[1][at], strict=True))
    assert notes == ([] if kind is Codes else [
        "what an optimizer keeps in a Marked stays where it is: what such a tensor does is not known"
    ])  # fmt: skip


def test_undo_without_a_step_leaves_everything_as_it_was() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, range(3))
    before = snapshot(model, optimizer)
    with applied(optimizer, "--offload optimizer") as (technique,):
        assert technique.host_bytes >= 0.9 * 8 * sum(p.numel() for p in model.parameters())
        big = [v for s in optimizer.state.values() for v in s.values() if v.numel() >= 1024]
        assert big
        assert all(is_spilled(v.untyped_storage()) for v in big)
        del big
    assert same(snapshot(model, optimizer), before)
    gc.collect()
    assert technique.host_bytes == 0


def test_buffers_are_written_again_and_not_made_anew() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with applied(optimizer, "--offload optimizer") as (technique,):
        train(model, optimizer, range(2))
        addresses, stored = [v.data_ptr() for v in spilled(optimizer)], technique.host_bytes
        train(model, optimizer, range(2, 6))
        assert [v.data_ptr() for v in spilled(optimizer)] == addresses
        assert technique.host_bytes == stored


def test_a_checkpoint_is_an_ordinary_one() -> None:
    model, twin = mlp(), mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    train(twin, plain, range(5))
    with applied(optimizer, "--offload optimizer"):
        train(model, optimizer, range(5))
        saved = optimizer.state_dict()
    assert same(saved, plain.state_dict())


def test_a_loaded_checkpoint_is_offloaded_too() -> None:
    model, twin = mlp(), mlp()
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    train(twin, plain, range(5))
    model.load_state_dict(twin.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    with applied(optimizer, "--offload optimizer"):
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))  # torch would share the tensors
        assert spilled(optimizer)
        losses = train(model, optimizer, range(5, 10))
    assert losses == train(twin, plain, range(5, 10))


def test_resident_state_is_small_between_steps() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with applied(optimizer, "--offload optimizer"):
        train(model, optimizer, range(2))
        on_disk = sum(v.untyped_storage().nbytes() for v in spilled(optimizer))
        assert state_bytes(optimizer) - on_disk < 0.2 * on_disk


def test_memory_layout_comes_back() -> None:
    convolution = torch.nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(convolution.parameters())
    convolution(torch.randn(2, 16, 8, 8)).sum().backward()
    with applied(optimizer, "--offload optimizer"):
        optimizer.step()
    weight = convolution.weight
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()


@pytest.mark.parametrize("seen", [0, 2])
@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "momentum"])
def test_a_step_interrupted_anywhere_can_be_completed(name: str, seen: int) -> None:
    model = mlp()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    with applied(optimizer, "--offload optimizer") as techniques:
        train(model, optimizer, range(seen))
        optimizer.zero_grad()
        loss_of(model, seen).backward()
        assert_recovers_anywhere(model, optimizer, techniques)


def test_nothing_of_the_model_stays_alive() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with applied(optimizer, "--offload optimizer") as techniques:
        train(model, optimizer, range(2))
    alive = [weakref.ref(p) for p in model.parameters()]
    del model, optimizer
    gc.collect()
    assert techniques
    assert all(reference() is None for reference in alive)


def test_the_tier_is_its_setting() -> None:
    assert OffloadOptimizer.setting(Plan.parse("--offload optimizer:disk,activations")) is Tier.DISK
    assert OffloadOptimizer.wanted(Plan.parse("--offload optimizer"))
    assert not OffloadOptimizer.wanted(Plan.parse("--offload activations"))


@pytest.mark.parametrize(
    ("flags", "make", "text"),
    [
        (
            "--offload optimizer",
            torch.optim.LBFGS,
            (
                "offload: LBFGS keeps one history for all parameters and evaluates the loss several times in a step; "
                "use torch.optim.AdamW with --offload optimizer, or LBFGS without it"
            ),
        ),
        (
            "--offload optimizer:host",
            torch.optim.AdamW,
            (
                "offload: optimizer to host: the model is on the CPU, whose memory is the host's; "
                "use --offload optimizer:disk (the default there)"
            ),
        ),
    ],
)
def test_refusals(flags: str, make: Any, text: str) -> None:
    optimizer = make(mlp().parameters())
    with pytest.raises(RefusalError) as refusal:
        techniques_of(flags)[0].check_optimizer(optimizer)
    assert str(refusal.value) == text


def test_a_state_dict_taken_in_inference_mode_follows_as_well() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fit(Workload(model, optimizer), "--adam8bit"):
        train(model, optimizer, range(2))
        with torch.inference_mode():
            held = optimizer.state_dict()
        train(model, optimizer, range(2, 4))
        now = optimizer.state_dict()
    assert all(torch.equal(held["state"][key]["exp_avg"], now["state"][key]["exp_avg"]) for key in held["state"])


@pytest.mark.parametrize("goes_on", ["loaded", "replaced"])
def test_a_state_dict_that_the_loop_holds_follows_the_state_as_torch_s_does(goes_on: str) -> None:
    runs = []
    for flags in ("", "--offload optimizer"):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with fit(Workload(model, optimizer), flags):
            train(model, optimizer, range(2))
            held = optimizer.state_dict()
            train(model, optimizer, range(2, 4))
            if goes_on == "loaded":
                optimizer.load_state_dict(held)  # the live tensors themselves: nothing goes back
            else:
                optimizer.state.clear()  # what is held stays as it is from now on
            train(model, optimizer, range(4, 6))
            given = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(given)  # torch goes on with these tensors
            train(model, optimizer, range(6, 8))
        runs.append({"held": held["state"], "given": given["state"], **snapshot(model, optimizer)})
    assert same(*runs)
